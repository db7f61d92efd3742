"""The user's step raises on one rank while it is recorded: all ranks end within seconds, and say which one failed."""

import traceback

import pytest

from harness.trainer_runs import ignore_warnings, trainer_of
from models.tiny import Tiny, loader

SAMPLES = 19  # in batches of four, in two microbatches each: the last batch has other shapes and is recorded too


class FailsOnOneRank(Tiny):
    """Fails on one rank in one batch of one step."""

    def __init__(self, rank, step, batch_idx):
        super().__init__()
        self.failing = rank, step, batch_idx

    def fail(self, step, batch_idx):
        if (self.trainer.strategy.mesh.rank, step, batch_idx) == self.failing:
            raise ZeroDivisionError("on purpose")

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.fail("training_step", batch_idx)
        return loss

    def validation_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.fail("validation_step", batch_idx)
        self.log("val", loss)

    def test_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.fail("test_step", batch_idx)
        self.log("test", loss)

    def predict_step(self, batch, batch_idx):
        self.fail("predict_step", batch_idx)
        return self(batch["x"])


def run_failing(size, pp, options, call, rank, step, batch_idx):
    """The messages of a rank that caught its error and continues, and the functions that raised it."""
    ignore_warnings()
    trainer = trainer_of(size, pp, strategy_options=options, num_sanity_val_steps=0)
    loaders = [loader(4, SAMPLES)] * (2 if call == "fit" else 1)
    try:
        getattr(trainer, call)(FailsOnOneRank(rank, step, batch_idx), *loaders)
    except Exception as error:
        functions = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        return type(error).__name__, str(error), functions, getattr(error, "__notes__", [])
    return None


def check(results, rank, step):
    """One rank has raised the user's error, from his code; the others say which."""
    name, message, functions, notes = results[rank]
    assert (name, message) == ("ZeroDivisionError", "on purpose")
    assert functions[-2:] == [step, "fail"]
    assert not any("had to stop" in text for text in notes)
    for index, (name, _, _, notes) in enumerate(results):
        if index != rank:
            assert name in ("RuntimeError", "DistNetworkError")
            [said] = [text for text in notes if "had to stop" in text]
            assert f" had to stop: rank {rank} (pipeline rank " in said
            assert "ZeroDivisionError: on purpose" in said


STAGES = 2, 2, {"num_microbatches": 2}


@pytest.mark.parametrize(
    ("call", "step", "rank"),
    [
        ("fit", "validation_step", 0),
        ("fit", "validation_step", 1),
        ("validate", "validation_step", 1),
        pytest.param("test", "test_step", 1, marks=pytest.mark.slow),
        ("predict", "predict_step", 1),
        pytest.param("fit", "training_step", 0, marks=pytest.mark.slow),
        ("fit", "training_step", 1),
    ],
)
def test_first_recording_of_a_step_in_stages(worlds, call, step, rank):
    check(worlds.run(2, run_failing, *STAGES, call, rank, step, 0, timeout=30), rank, step)


@pytest.mark.parametrize("rank", [0, 1])
def test_recording_of_a_later_batch_in_stages(worlds, rank):
    check(worlds.run(2, run_failing, *STAGES, "fit", rank, "training_step", 4, timeout=30), rank, "training_step")


@pytest.mark.parametrize(
    ("options", "step", "rank"),
    [
        ({"tensor_parallel_size": 2}, "training_step", 0),
        ({"tensor_parallel_size": 2}, "training_step", 1),
        pytest.param({"tensor_parallel_size": 2}, "predict_step", 0, marks=pytest.mark.slow),
        pytest.param({"context_parallel_size": 2}, "training_step", 0, marks=pytest.mark.slow),
    ],
)
def test_first_recording_of_a_step_without_stages(worlds, options, step, rank):
    call = "predict" if step == "predict_step" else "fit"
    check(worlds.run(2, run_failing, 2, 1, options, call, rank, step, 0, timeout=30), rank, step)
