"""Commands that record a step: errors of data, devices and classes say what to pass, without a traceback."""

import pytest
import torch

from lightning_hybrid.cli import main

FAILURES = "tests/models/command_line_failures.py"
USAGE, REFUSED = 2, 3
COMMANDS = {"plan": ["--hardware", "cpu", "--devices", "2"], "dryrun": ["--layout", "pp=2"]}
BOTH = ["plan", pytest.param("dryrun", marks=pytest.mark.slow)]
PASS_DATA = "pass --data path.to:DataModule, or --data path.to:function of a function that makes loaders (--help)"


def run_on(command, name, *arguments):
    return main([command, f"{FAILURES}:{name}", *COMMANDS[command], *arguments])


@pytest.mark.parametrize("command", BOTH)
@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("NoLoader", None, ["`train_dataloader` must be implemented", PASS_DATA]),
        ("NoLoader", "NoTrainingData", ["`train_dataloader` must be implemented", PASS_DATA]),
        ("NoLoader", "CannotPrepare", ["command_line_failures.py:", "in prepare_data: FileNotFoundError: no archive"]),
        ("NoLoader", "NeedsFolder", ["give --data.folder VALUE: the constructor has no default for it"]),
        ("FailingLoader", None, ["in train_dataloader: FileNotFoundError", PASS_DATA]),
        ("LoaderOfDataModule", None, ["in train_dataloader: AttributeError: 'NoneType' object", PASS_DATA]),
        ("LoaderIsNone", None, ["TypeError: 'NoneType' object is not iterable", PASS_DATA]),
        ("NoStep", None, ["No `training_step()` method defined"]),
        ("NoLightning", None, ["NoLightning is no LightningModule"]),
        ("NeedsArguments", None, ["give --module.width VALUE, --module.depth VALUE"]),
        ("NoSuchName", None, ["has no NoSuchName"]),
    ],
)
def test_what_to_pass(command, name, data, words, capsys):
    arguments = [] if data is None else ["--data", f"{FAILURES}:{data}"]
    assert run_on(command, name, *arguments) == USAGE
    error = capsys.readouterr().err
    assert f"lightning-hybrid {command}: " in error and "Traceback" not in error
    for each in words:
        assert each in error


def test_loader_without_a_batch(capsys):
    assert run_on("plan", "EmptyLoader") == USAGE
    assert "the loader yields no batch" in capsys.readouterr().err
    assert run_on("dryrun", "EmptyLoader") == REFUSED
    assert "refused: ValueError: the loader yields no batch" in capsys.readouterr().out


@pytest.mark.parametrize("command", BOTH)
def test_cuda_device(command, capsys, monkeypatch):
    if torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "_lazy_init", no_device)
    assert run_on(command, "OnCuda") == USAGE
    error = capsys.readouterr().err
    assert " in __init__ uses a CUDA device, and there is none in this process" in error


def no_device():
    raise RuntimeError("No CUDA GPUs are available")


def test_batch_of_another_kind(capsys):
    assert run_on("dryrun", "OtherBatch") == REFUSED
    assert "AttributeError: 'dict' object has no attribute 'no_such_field'" in capsys.readouterr().out.replace(
        "\n    ", " "
    )
    assert run_on("plan", "OtherBatch") == 0
    said = "the step was not recorded (AttributeError: 'dict' object has no attribute 'no_such_field')"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("command", BOTH)
@pytest.mark.parametrize("name", ["SteppingBatches", "BuiltLater"])
def test_modules_that_need_the_trainer(command, name, capsys):
    assert run_on(command, name) == 0
    assert "was not recorded" not in capsys.readouterr().out


def test_data_module_that_prepares_data():
    """Lightning waits for all ranks around ``prepare_data``, and these are not there."""
    assert run_on("dryrun", "NoLoader", "--data", f"{FAILURES}:Prepares") == 0
