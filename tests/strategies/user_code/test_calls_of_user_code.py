"""User code runs as often as in one process, with arguments of the same types."""

import warnings

import pytest
import torch
from lightning.pytorch.loops.optimization.automatic import Closure
from torch import nn

from harness.trainer_runs import trainer_of
from models.regression import FEATURES, Regressor, mlp, regression_data


class CountsSteps(torch.optim.SGD):
    """Counts its steps on the class: copies of it count too."""

    steps = 0

    def step(self, closure=None):
        CountsSteps.steps += 1
        return super().step(closure)


class Counts(Regressor):
    """Masks a feature in a transfer hook, by a mask that it keeps, and counts what is called."""

    def __init__(self):
        super().__init__()
        self.body, self.head = mlp(), nn.Linear(FEATURES, 1)
        self.transfers, self.mask, self.closures = 0, None, set()

    def forward(self, x):
        return self.head(self.body(x * self.mask))

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.transfers += 1
        self.mask = torch.ones(FEATURES, dtype=torch.float64)
        return batch

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        self.closures.add(isinstance(optimizer_closure, Closure))
        optimizer.step(closure=optimizer_closure)

    def configure_optimizers(self):
        return CountsSteps(self.parameters(), lr=0.1)

    def on_train_start(self):
        self.steps_before = CountsSteps.steps


def counts(size, pp, options):
    warnings.simplefilter("ignore")
    CountsSteps.steps = 0
    module = Counts().double()
    trainer_of(size, pp, strategy_options=options, limit_train_batches=2).fit(
        module, regression_data()["train_dataloaders"]
    )
    return module.transfers, module.closures, module.steps_before


@pytest.mark.parametrize(
    ("size", "pp", "options"),
    [(1, 1, {"num_microbatches": 2}), (2, 2, {}), (2, 1, {"tensor_parallel_size": 2}), (2, 1, {"zero_stage": 3})],
    ids=["microbatches", "pp2", "tp2", "zero3"],
)
def test_as_often_as_in_one_process(worlds, size, pp, options):
    [(transfers, closures, before)] = worlds.run(1, counts, 1, 1, {})
    assert closures == {True} and before == 0
    for rank in worlds.run(size, counts, size, pp, options):
        assert rank[:2] == (transfers, closures)
        assert rank[2] == 0 or size > 1  # an optimizer of shards is tried on copies
