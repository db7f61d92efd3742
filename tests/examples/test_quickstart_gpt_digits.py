"""The examples of pipelines over replicas, tensor ranks and YAML, run at tiny size."""

import re

import pytest

from harness.example_programs import EXAMPLES, run_example

GPT = ["--steps", "2", "--layers", "2", "--width", "32", "--length", "32", "--microbatches", "2"]


@pytest.mark.slow
def test_quickstart_goes_on_under_another_layout(tmp_path, monkeypatch):
    output = run_example(monkeypatch, tmp_path, "quickstart.py")
    assert "4 ranks = pipeline 2 x data 2" in output and (tmp_path / "timeline.png").exists()
    [saved] = tmp_path.glob("lightning_logs/version_0/checkpoints/*.ckpt")
    output = run_example(monkeypatch, tmp_path, "quickstart.py", str(saved))
    assert "Restored all states" in output and "ZeRO-3" in output


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [["--tensor", "1", "--data", "1"], ["--pipeline", "1", "--data", "1", "--sequence-parallel"]],
    ids=["two stages", "two tensor ranks"],
)
def test_gpt_writes_a_text(tmp_path, monkeypatch, layout):
    output = run_example(monkeypatch, tmp_path, "gpt.py", *GPT, *layout)
    assert re.search(r"training loss +[\d.]+ -> [\d.]+ bits per byte", output), output
    assert (tmp_path / "lightning_logs" / "gpt" / "loss.png").exists()


@pytest.mark.slow
def test_gpt_from_yaml(tmp_path, monkeypatch):
    small = [
        "--trainer.max_steps",
        "2",
        "--trainer.val_check_interval",
        "2",
        "--model.layers",
        "2",
        "--model.width",
        "32",
    ]
    config = str(EXAMPLES / "configs" / "pipeline.yaml")
    output = run_example(monkeypatch, tmp_path, "gpt_cli.py", "fit", "--config", config, *small, "--data.length", "32")
    assert "2 ranks = pipeline 2 x data 1" in output


@pytest.mark.slow
def test_digits_are_recognised(tmp_path, monkeypatch):
    output = run_example(monkeypatch, tmp_path, "digits.py", "--epochs", "2")
    assert float(re.search(r"accuracy ([\d.]+) after 2 epochs", output)[1]) > 0.7
