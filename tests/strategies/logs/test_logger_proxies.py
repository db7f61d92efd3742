"""Direct calls of a step to its logger: once per batch and with real numbers, as in one process."""

import warnings

import pytest
import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from harness.fits import trainer_of
from lightning_hybrid import Hybrid3DStrategy
from models.regression import Regression, regression_data


class Experiment:
    directory = "here"

    def __init__(self):
        self.calls = []

    def add_scalar(self, name, value, step):
        self.calls.append((name, float(value), step))


class Notebook(Logger):
    """A third-party logger: its experiment is real on rank 0 only."""

    name, version = "notebook", 0

    def __init__(self):
        super().__init__()
        self.own = Experiment()

    @property
    @rank_zero_experiment
    def experiment(self):
        return self.own

    @rank_zero_only
    def log_metrics(self, metrics, step=None):
        self.own.calls.append(("metrics", {name: float(value) for name, value in metrics.items()}, step))

    def log_hyperparams(self, *_):
        pass


class CallsLogger(Regression):
    def training_step(self, batch, batch_idx):
        assert isinstance(self.logger, Notebook)
        h = self.layers[0](batch[0])
        loss = self.loss(batch)
        experiment = self.logger.experiment
        experiment.add_scalar("loss", loss.item(), self.global_step)
        self.logger.log_metrics({"first": h.detach().mean()}, step=self.global_step)
        if batch_idx % 2:
            experiment.add_scalar("twice", 2 * loss.item(), self.global_step)
        experiment.add_scalar("rate", 0.1, self.global_step)
        return loss


class CallsLoggerTwice(Regression):
    """The same method twice: two calls of one batch, not one of two microbatches."""

    def training_step(self, batch, batch_idx):
        h = self.layers[0](batch[0])
        loss = self.loss(batch)
        self.logger.experiment.add_scalar("loss", loss.item(), self.global_step)
        self.logger.experiment.add_scalar("first", h.detach().mean(), self.global_step)
        return loss


class CallsWithoutNumbers(Regression):
    """No model values, by a call per microbatch."""

    def training_step(self, batch, batch_idx):
        self.logger.experiment.add_scalar("batch", batch_idx, self.global_step)
        return self.loss(batch)


class CallsWithArithmetic(Regression):
    """Numbers that are affine in a mean over samples, by operators of Python."""

    def training_step(self, batch, batch_idx):
        loss, other = self.loss(batch), self.layers[0](batch[0]).square().mean()
        experiment = self.logger.experiment
        experiment.add_scalar("loss", loss.item(), self.global_step)
        experiment.add_scalar("affine", 1 - 2 * loss.item() / 3 - other.item(), self.global_step)
        self.logger.log_metrics({"negative": -loss.item(), "tensor": loss}, step=self.global_step)
        return loss


class CallsWithSquares(Regression):
    """A number that is no mean of those of the microbatches."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.logger.experiment.add_scalar("square", loss.item() ** 2, self.global_step)
        self.logger.experiment.add_scalar("product", 2 * loss.item() * loss.item(), self.global_step)
        return loss


class CallsWithFloat(Regression):
    """Python's ``float`` loses how the number is computed."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.logger.experiment.add_scalar("twice", 2 * float(loss), self.global_step)
        return loss


def run_calls(module, strategy, devices):
    torch.manual_seed(0)
    logger, model = Notebook(), module().double()
    trainer = trainer_of(devices, strategy, [], max_epochs=1, logger=logger, limit_val_batches=0)
    data = regression_data()
    trainer.fit(model, torch.utils.data.DataLoader(data["train_dataloaders"].dataset, 8))
    assert "_hybrid_logger_calls" not in vars(model)
    return logger.own.calls


def run_over_stages(module, num_microbatches, stages):
    options = {"pipeline_parallel_size": 2, "num_microbatches": num_microbatches, "stages_per_rank": stages}
    return run_calls(module, Hybrid3DStrategy(**options), 2)


def run_and_list_warnings(module, num_microbatches):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        calls = run_over_stages(module, num_microbatches, 1)
    return calls, [str(one.message) for one in caught if "is one microbatch" in str(one.message)]


@pytest.mark.parametrize(
    ("module", "num_microbatches", "num_warnings"),
    [
        (CallsWithArithmetic, 1, 0),
        (CallsWithArithmetic, 2, 0),
        (CallsWithArithmetic, 4, 0),
        (CallsWithSquares, 2, 1),
        (CallsWithFloat, 2, 1),
    ],
)
def test_numbers_that_python_computes(worlds, module, num_microbatches, num_warnings):
    [expected] = worlds.run(1, run_calls, module, "auto", 1)
    (calls, warned), _ = worlds.run(2, run_and_list_warnings, module, num_microbatches)
    assert len(warned) == num_warnings and len(calls) == len(expected) > 3
    for actual, wanted in zip(calls, expected, strict=True):
        assert actual[::2] == wanted[::2]
        assert actual[1] == pytest.approx(wanted[1], rel=1e-9)


@pytest.mark.parametrize(
    ("module", "num_microbatches"),
    [(CallsLogger, 2), (CallsLogger, 1), (CallsLoggerTwice, 2), (CallsWithoutNumbers, 2)],
)
@pytest.mark.parametrize("stages", [1, 2])
def test_loggers_are_called_once_with_numbers(worlds, module, num_microbatches, stages):
    [expected] = worlds.run(1, run_calls, module, "auto", 1)
    calls, nothing = worlds.run(2, run_over_stages, module, num_microbatches, stages)
    assert nothing == [] and len(calls) == len(expected) > 3
    for actual, wanted in zip(calls, expected, strict=True):
        assert actual[::2] == wanted[::2]
        assert actual[1] == pytest.approx(wanted[1], rel=1e-9)
