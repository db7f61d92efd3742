"""`sync_batchnorm=True`: replicas normalise by joint statistics, as one process does on their joined batches."""

import dataclasses

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.layer_sync import LayerSync
from torch import nn
from torch.utils.data import DataLoader

from harness.fits import Run, assert_parity, fit, reference_of, trainer_of
from lightning_hybrid import Hybrid3DStrategy
from models.cases import make

SYNC = {"sync_batchnorm": True}
FULL, SELECTIVE = {"recompute": "full"}, {"recompute": "selective"}
slow = pytest.mark.slow
RUNS = [
    Run("BatchNorms", dp=2, microbatches=1, trainer=SYNC),
    Run("BatchNorms", dp=2, microbatches=1, trainer=SYNC, strategy=FULL),
    Run("BatchNorms", pp=2, dp=2, trainer=SYNC, strategy={**FULL, "zero_stage": 3, "reshard_after_forward": True}),
    pytest.param(Run("BatchNorms", pp=2, dp=2, trainer=SYNC, strategy={"stages_per_rank": 2}), marks=slow),
    pytest.param(Run("BatchNorms", dp=2, trainer=SYNC, strategy=SELECTIVE), marks=slow),
    pytest.param(Run("BatchNorms", dp=2, microbatches=1, trainer=SYNC, strategy=SELECTIVE), marks=slow),
    pytest.param(Run("BatchNorms", dp=2, tp=2, microbatches=1, trainer=SYNC), marks=slow),
    pytest.param(Run("BatchNorms", pp=2, dp=2, trainer=SYNC, strategy={"compile": "units"}), marks=slow),
    pytest.param(Run("BatchNorms", dp=4, microbatches=1, trainer=SYNC), marks=slow),
]


def named(run):
    return f"pp{run.pp}-dp{run.dp}-tp{run.tp}-m{run.microbatches}-{run.strategy}"


def accumulated(run):
    """The one-process reference: each microbatch of all replicas is a batch, and their gradients add up."""
    size, times = run.batch_size // run.microbatches, run.microbatches
    trainer = {**run.trainer, "accumulate_grad_batches": times}
    return dataclasses.replace(
        run, batch_size=size, num_batches=run.num_batches * times, microbatches=1, trainer=trainer
    )


@pytest.mark.parametrize("run", RUNS, ids=named)
def test_statistics_are_those_of_all_replicas(worlds, run):
    expected = reference_of(worlds, accumulated(run))
    times = run.microbatches
    losses = [expected.losses[i : i + times] for i in range(0, len(expected.losses), times)]
    expected.losses = [torch.stack(each).sum() for each in losses]  # Lightning divides each by their number
    assert_parity(worlds.run(run.world_size, fit, run), expected, run, tolerance=1e-9)


def test_default_statistics_are_per_replica(worlds):
    run = Run("BatchNorms", dp=2, microbatches=1)
    expected = reference_of(worlds, run)
    rank, _ = worlds.run(2, fit, run)
    assert not torch.allclose(rank.state["norm.running_mean"], expected.state["norm.running_mean"], rtol=1e-3)


class StepsTwice(LightningModule):
    """Two forwards and backwards in a manual step; one of its norms is in eval mode."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        norms = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), norm, nn.Tanh()) for norm in norms)

    def on_train_epoch_start(self):
        self.layers[1][1].eval()

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        for power in (2, 4):
            x = batch
            for layer in self.layers:
                x = layer(x)
            optimizer.zero_grad()
            self.manual_backward(x.pow(power).mean())
            optimizer.step()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_twice(size, strategy):
    module, data = StepsTwice().double(), torch.randn(16, 4, generator=torch.Generator().manual_seed(1)).double()
    trainer = trainer_of(
        size, Hybrid3DStrategy(**strategy) if size > 1 else None, [], use_distributed_sampler=False, **SYNC
    )
    rows = range(trainer.global_rank, 16, size)  # each replica has its share of each batch
    trainer.fit(module, DataLoader(data, batch_size=8 // size, sampler=rows))
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("strategy", [{}, FULL, {"zero_stage": 3}], ids=str)
def test_manual_steps_with_a_norm_in_eval_mode(worlds, strategy):
    [expected] = worlds.run(1, fit_twice, 1, {})
    for state in worlds.run(2, fit_twice, 2, {"num_microbatches": 1, **strategy}):
        torch.testing.assert_close(state, expected, rtol=1e-9, atol=1e-12)


class UserSync(LayerSync):
    def apply(self, model):
        return model

    def revert(self, model):
        return model


def fit_refused(trainer, strategy):
    module = make("BatchNorms", torch.float64)
    strategy = Hybrid3DStrategy(data_parallel_size=2, **strategy)
    try:
        trainer_of(2, strategy, [], **trainer).fit(module, DataLoader(range(4)))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("trainer", "strategy", "message"),
    [
        (SYNC, {"verify_first_step": True}, "set verify_first_step=False"),
        ({"plugins": [UserSync()]}, {}, "UserSync replaces layers"),
    ],
)
def test_refused(worlds, trainer, strategy, message):
    assert all(message in text for text in worlds.run(2, fit_refused, trainer, strategy))
