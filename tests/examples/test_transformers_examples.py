"""Examples of fine-tuning with transformers and peft run at tiny size."""

import os
import re
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from harness.launched_jobs import run

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = ["--width", "16", "--layers", "2", "--heads", "2", "--batch", "4", "--microbatches", "2", "--val-batches", "1"]
ONE_PROCESS = ["--devices", "1", "--pipeline", "1"]


def output_of(name, *arguments):
    code, output, _ = run([sys.executable, str(EXAMPLES / name), *map(str, arguments)], timeout=400)
    assert code == 0, output[-4000:]
    return output


def logged(folder):
    """The names of scalars and texts in TensorBoard's logs of a run."""
    tags = EventAccumulator(str(folder)).Reload().Tags()
    return {*tags["scalars"], *tags["tensors"]}


@pytest.mark.slow
def test_a_causal_language_model_is_trained_resumed_and_adapted(tmp_path):
    tuned, adapted = tmp_path / "tuned", tmp_path / "adapted"
    output = output_of("hugging_face.py", *TINY, "--steps", 2, "--out", tuned)
    assert "pipeline 2" in output and "each microbatch is weighted by its number of labels" in output, output
    assert {"val_loss", "docstring/text_summary"} <= logged(tuned / "logs" / "version_0")
    assert (tuned / "checkpoints" / "last.ckpt" / "manifest.json").exists()

    options = ["--resume", "--steps", 3, "--pipeline", 1, "--zero", 3, "--precision", "bf16-true"]
    output = output_of("hugging_face.py", *TINY, *options, "--out", tuned)
    assert "ZeRO-3" in output and "Restored all states" in output and "after 3 steps" in output, output

    # The base is what was saved; peft's adapters are trained over stages.
    output = output_of("lora.py", *TINY, "--pretrained", tuned / "model", "--steps", 2, "--out", adapted)
    trained, total = re.search(r"([\d,]+) of ([\d,]+) parameters trained", output).groups()
    trained, total = int(trained.replace(",", "")), int(total.replace(",", ""))
    width, rank, layers = 16, 8, 2
    linears = 4 * (width + width) + 3 * (width + 4 * width)  # inputs and outputs of a layer's linears
    assert trained == layers * rank * linears and total > trained
    assert 4 * trained < os.path.getsize(adapted / "adapter" / "adapter_model.safetensors") < 8 * trained
    assert "trained and the loaded model: 0.0e+00" in output, output


@pytest.mark.slow
def test_a_sequence_classifier_is_trained():
    output = output_of("hugging_face_classifier.py", "--width", 16, "--layers", 2, "--steps", 2)
    assert "pipeline 2" in output and re.search(r"accuracy [01]\.\d\d after 2 steps", output), output


@pytest.mark.slow
def test_adapters_are_trained_over_replicas_that_shard_the_base(tmp_path):
    output = output_of("lora.py", *TINY, "--pipeline", 1, "--zero", 3, "--steps", 2, "--out", tmp_path)
    assert "zero_stage=3: optimizer states, gradients and parameters sharded over 2 replicas" in output, output
    assert "trained and the loaded model: 0.0e+00" in output, output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "layout"),
    [
        ([], "pipeline 2 x data 1"),
        (["--model", "resnet", "--pipeline", "1", "--sync-batchnorm"], "pipeline 1 x data 2"),
    ],
    ids=["ViT over stages", "ResNet over replicas"],
)
def test_images_are_classified(tmp_path, options, layout):
    small = ["--width", 16, "--layers", 2, "--heads", 2, "--workers", 1, "--epochs", 1, "--batches", 2]
    output = output_of("vit.py", *small, *options, "--out", tmp_path)
    assert layout in output and "2 steps" in output, output
    assert re.search(r"best validation accuracy [01]\.\d+: \S+\.ckpt", output), output
    assert "val_accuracy" in logged(tmp_path / "logs" / "version_0")
