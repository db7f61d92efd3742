"""What a step reads as arrays and plain floats, given to metrics, appended to lists and logged."""

import numpy
import pytest
import torch
from torch.nn import functional as F
from torchmetrics import MaxMetric, MeanMetric, Metric

from harness.stored_values import StoresValues, assert_equal, run
from harness.worlds.worlds_plugin import RankError

STAGES = {"pipeline_parallel_size": 2, "num_microbatches": 2}


class Distance(Metric):
    """A metric of a project, of arrays."""

    def __init__(self):
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("rows", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, scores, labels):
        assert isinstance(scores, numpy.ndarray)
        self.total += numpy.abs(scores - labels).sum()
        self.rows += len(scores)

    def compute(self):
        return self.total / self.rows


class ReadsArrays(StoresValues):
    """Reads a loss, an extreme and outputs as arrays, and a loss as a float."""

    def __init__(self):
        super().__init__()
        self.mean, self.numbers, self.called = (MeanMetric().double() for _ in range(3))
        self.most, self.distance, self.evaluated = MaxMetric().double(), Distance(), MeanMetric().double()
        self.losses, self.floats, self.evaluations = [], [], []

    def store(self, loss, out, batch, batch_idx):
        self.mean.update(loss.detach().cpu().numpy())
        self.most.update(out.detach().max().numpy())
        self.distance.update(out.detach().cpu().numpy(), batch[1].numpy())
        self.numbers.update(float(loss))
        self.called(loss.detach().numpy())
        self.losses.append(loss.detach().cpu().numpy())
        self.floats.append(float(loss))

    def validation_step(self, batch, batch_idx):
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.evaluated.update(loss.cpu().numpy())
        self.evaluations.append(loss.cpu().numpy())

    def on_train_epoch_end(self):
        for name in ("mean", "numbers", "called", "most", "distance"):
            metric = getattr(self, name)
            self.log(name, metric.compute())
            metric.reset()

    def on_validation_epoch_end(self):
        self.log("evaluated", self.evaluated.compute())
        self.log("evaluations", float(numpy.mean(self.evaluations)))
        self.evaluated.reset()


def test_numbers_are_those_of_one_process(worlds):
    expected = run(ReadsArrays, 1, {})
    for values, logged, weights in worlds.run(2, run, ReadsArrays, 2, STAGES, timeout=60):
        for found, wanted in zip((values, logged, weights), expected, strict=True):
            assert_equal(found, wanted)


class Converts(StoresValues):
    """Gives a metric a number of the model in a type that does not tell where it is from."""

    def __init__(self):
        super().__init__()
        self.mean = MeanMetric().double()

    def store(self, loss, out, batch, batch_idx):
        self.mean.update(numpy.float32(loss.item()))
        self.mean.update(numpy.array([loss.item()]))

    def on_train_epoch_end(self):
        self.log("mean", self.mean.compute())


def test_a_converted_number_is_not_lost(worlds):
    expected = run(Converts, 1, {})
    for _, logged, weights in worlds.run(2, run, Converts, 2, STAGES, timeout=60):
        assert_equal([logged, weights], list(expected[1:]))


class LogsArray(StoresValues):
    def store(self, loss, out, batch, batch_idx):
        self.log("loss", loss.detach().numpy())


def test_an_array_is_logged_nowhere(worlds):
    """As without stages, and on all ranks."""
    refusal = "`ndarray` values cannot be logged"
    with pytest.raises(ValueError, match=refusal):
        run(LogsArray, 1, {})
    with pytest.raises(RankError) as error:
        worlds.run(2, run, LogsArray, 2, STAGES, timeout=60)
    assert str(error.value).count(refusal) == 2
