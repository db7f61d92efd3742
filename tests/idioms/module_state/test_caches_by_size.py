"""Caches per batch size on the module: a mask in a buffer, rebound when the number of samples changes."""

import itertools

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from harness.trainer_runs import assert_same, ignore_warnings, trainer_of
from models.regression import FEATURES


class WithWeights(nn.Module):
    """A layer, and weights that depend only on sizes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)

    def forward(self, x):
        return torch.tanh(self.linear(x)), torch.ones(len(x), 1, dtype=x.dtype)


class Cached(LightningModule):
    """A mask per sample for batches of one size, and the last weights and outputs."""

    def __init__(self):
        super().__init__()
        self.size = -1
        self.register_buffer("mask", None, persistent=False)
        self.first, self.second, self.third = WithWeights(), WithWeights(), WithWeights()
        self.head = nn.Linear(FEATURES, 1)
        self.weights = self.out = None

    def forward(self, x):
        if len(x) != self.size:
            self.mask = torch.linspace(0.5, 1, FEATURES, dtype=x.dtype).repeat(len(x), 1)
            self.size = len(x)
        hidden, self.weights = self.first(x * self.mask)
        self.out, _ = self.third(self.second(hidden)[0])
        return self.head(self.out)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("kept", self.weights.sum() + self.out.square().sum() + self.size + len(self.mask))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Banks(Cached):
    """A buffer that grows by the outputs of each batch."""

    def __init__(self):
        super().__init__()
        self.register_buffer("bank", torch.zeros(1, FEATURES))
        self.seen = 0

    def training_step(self, batch, batch_idx):
        x, y = batch
        hidden, self.weights = self.first(x)
        self.bank = torch.cat([self.bank, hidden.detach()])[-11:]
        self.seen += len(x)
        return F.mse_loss(self.head(self.second(hidden)[0]), y)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("kept", float(self.seen))


def short_last_batch():
    """The last batch is smaller, and the next epoch begins with a full one."""
    index = torch.arange(22, dtype=torch.float64).unsqueeze(1)
    x = torch.cos(index * torch.arange(1, FEATURES + 1) + index)
    return {"train_dataloaders": DataLoader(TensorDataset(x, x.sum(1, keepdim=True).tanh()), batch_size=8)}


def run_cached(size, make_module, options):
    ignore_warnings()
    torch.manual_seed(0)
    module = make_module().double()
    trainer = trainer_of(size, size, max_epochs=2, strategy_options=options)
    trainer.fit(module, **short_last_batch())
    kept = module.bank if isinstance(module, Banks) else module.mask
    return trainer.callback_metrics["kept"].item(), kept.tolist()


@pytest.mark.parametrize("make_module", [Cached, Banks], ids=lambda module: module.__name__)
def test_caches_of_the_full_batch(worlds, make_module):
    [expected] = worlds.run(1, run_cached, 1, make_module, {})
    stages = {"stages_per_rank": 2} if make_module is Cached else {}
    found = worlds.run(2, run_cached, 2, make_module, stages)
    for logged, kept in found:
        assert logged == pytest.approx(expected[0])
        assert_same({"kept": kept}, {"kept": expected[1]})


class Differs(Cached):
    """It differs each time, by a counter outside of the module."""

    runs = itertools.count()

    def training_step(self, batch, batch_idx):
        if batch_idx < 0:  # its number is read, so that the step has a dry run
            return None
        out = self.head(self.second(self.first(batch[0])[0])[0])
        for _ in range(next(self.runs)):
            out = out * 2
        return out.square().mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        pass


def run_differing(size, options):
    ignore_warnings()
    trainer = trainer_of(size, size, strategy_options=options)
    trainer.fit(Differs().double(), **short_last_batch())
    return trainer.global_step, trainer.strategy.run.batch_shares


def test_always_differing_step_is_not_pipelined(worlds):
    assert worlds.run(1, run_differing, 1, {"num_microbatches": 2}) == [(3, 1)]
    assert worlds.run(2, run_differing, 2, {}) == [(3, 2)] * 2
