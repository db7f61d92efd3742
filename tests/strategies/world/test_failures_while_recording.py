"""The user's step raises on one rank while it is recorded or checked: all end within seconds, and name that rank."""

import traceback
from unittest import mock

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.data import DataLoader

from harness.trainer_runs import ignore_warnings, trainer_of
from lightning_hybrid.tensor.runtime import unit
from models.cases import Samples
from models.mixtures import Looped
from models.tiny import FEATURES, Tiny, loader

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
    assert step in functions and functions[-1] in ("fail", "forward")
    assert not any("had to stop" in text for text in notes)
    for index, (name, _, _, notes) in enumerate(results):
        if index != rank:
            assert name in ("RuntimeError", "DistNetworkError")
            [said] = [text for text in notes if "had to stop" in text]
            assert f" had to stop: rank {rank} " in said
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


class Layer(nn.Module):
    """It may raise in a batch before the ranks that shard it have communicated."""

    def __init__(self, is_failing):
        super().__init__()
        self.up, self.down, self.is_failing = nn.Linear(FEATURES, 8), nn.Linear(8, FEATURES), is_failing

    def forward(self, x):
        y = torch.tanh(self.up(x))
        if self.is_failing() and not isinstance(x, FakeTensor):
            raise ZeroDivisionError("on purpose")
        return x + self.down(y)


class FailsInLayer(Tiny):
    def __init__(self, rank):
        super().__init__()
        self.rank, self.has_begun = rank, False
        layers = [Layer(self.is_failing) for _ in range(3)]
        self.layers = nn.Sequential(*layers, nn.Linear(FEATURES, 1)).double()

    def is_failing(self):
        return self.has_begun and self.trainer.strategy.mesh.rank == self.rank

    def on_train_batch_start(self, *_):
        self.has_begun = True


def run_failing_in_layer(rank, options):
    ignore_warnings()
    trainer = trainer_of(2, 1, strategy_options=options, num_sanity_val_steps=0)
    try:
        with mock.patch.object(unit, "_SECONDS_FOR_OTHERS", 0.5):
            trainer.fit(FailsInLayer(rank), loader(4))
    except Exception as error:
        functions = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        return type(error).__name__, str(error), functions, getattr(error, "__notes__", [])
    return None


@pytest.mark.parametrize("rank", [0, 1])
def test_check_of_a_sharded_layer(worlds, rank):
    """The other rank waits in the layer, and cannot come to where they compare what it does."""
    options = {"tensor_parallel_size": 2, "sequence_parallel": True}
    check(worlds.run(2, run_failing_in_layer, rank, options, timeout=30), rank, "forward")


class FailsWithExperts(Looped):
    rank = 0

    def training_step(self, batch, batch_idx=0):
        if self.trainer.strategy.mesh.rank == self.rank:
            raise ZeroDivisionError("on purpose")
        return super().training_step(batch, batch_idx)


def run_failing_with_experts(rank):
    ignore_warnings()
    module = FailsWithExperts()
    module.rank = rank
    data = DataLoader(Samples(module.kind, 16, torch.float32), batch_size=8)
    try:
        trainer_of(2, strategy_options={"expert_parallel_size": 2}, num_sanity_val_steps=0).fit(module, data)
    except Exception as error:
        functions = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        return type(error).__name__, str(error), functions
    return None


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_recording_of_a_step_with_experts(worlds, rank):
    """No rank finds experts without a recording; the reason is the user's error."""
    results = worlds.run(2, run_failing_with_experts, rank, timeout=60)
    assert results[rank][:2] == ("ZeroDivisionError", "on purpose") and "training_step" in results[rank][2]
    assert results[1 - rank][:2] == ("StepError", f"on rank {rank}: ZeroDivisionError: on purpose")
