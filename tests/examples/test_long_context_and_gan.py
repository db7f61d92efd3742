"""Examples of context ranks, and of manual optimization under shards, run at tiny size."""

import re

import pytest

from harness.example_programs import run_example


@pytest.mark.slow
def test_context_ranks_share_saved_activations(tmp_path, monkeypatch):
    options = ["--length", "256", "--steps", "2", "--layers", "2", "--width", "32"]
    output = run_example(monkeypatch, tmp_path, "long_context.py", *options)
    per_rank, one = re.search(
        r"saved activations +([\d.]+) MiB on the first rank, ([\d.]+) MiB in one", output
    ).groups()
    assert 0.4 * float(one) < float(per_rank) < 0.75 * float(one)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "layout"),
    [
        (["--zero", "3"], "zero_stage=3: .* sharded over 2 replicas"),
        (["--pipeline", "2"], "sharded instead of pipelined: .* manual optimization"),
    ],
    ids=["ZeRO-3", "shards over a pipeline"],
)
def test_gan_trains_two_optimizers_by_hand(tmp_path, monkeypatch, options, layout):
    output = run_example(monkeypatch, tmp_path, "gan.py", "--epochs", "1", "--width", "32", *options)
    assert re.search(layout, output), output
    assert re.search(r"discriminator [\d.]+, generator [\d.]+ after 28 batches", output), output
    assert (tmp_path / "lightning_logs" / "version_0" / "digits.png").exists()
