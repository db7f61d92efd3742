"""A module whose steps keep numbers, a fit of it, and the comparison of what two fits kept."""

from collections import deque

import numpy
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from harness.trainer_runs import ignore_warnings, trainer_of
from models.regression import FEATURES

SAMPLES, BATCH = 20, 8  # the last batch is a short one


class Keeps(LightningModule):
    """Each test says what its step keeps; `kept()` is what is compared."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh()) for _ in range(4)))
        self.head = nn.Linear(FEATURES, 1)
        self.double()
        self.logged = {}

    def forward(self, x):
        return self.head(self.body(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self(x)
        loss = F.mse_loss(out, y)
        self.keep(loss, out, batch, batch_idx)
        return loss

    def keep(self, loss, out, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Meter:
    """The plain object of many a repository."""

    def __init__(self):
        self.sum = self.count = self.value = self.average = 0.0

    def update(self, value, n):
        self.value, self.sum, self.count = value, self.sum + value * n, self.count + n
        self.average = self.sum / self.count


def kept_by(module):
    """What stays in attributes of the module, as plain lists and dicts."""
    own = {name: value for name, value in vars(module).items() if not name.startswith("_") and name != "log"}
    return {name: plain(value) for name, value in own.items() if name not in ("training", "prepare_data_per_node")}


def plain(value):
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | deque):
        return [type(value).__name__, *map(plain, value)]
    if isinstance(value, torch.Tensor):
        return ["tensor", *plain(value.tolist())] if value.dim() else ["tensor", value.item()]
    if isinstance(value, numpy.ndarray):
        return ["array", plain(value.tolist())]
    if isinstance(value, Meter):
        return plain(vars(value))
    return value


def assert_alike(ours, theirs, where="self"):
    assert type(ours) is type(theirs), f"{where}: {ours} and {theirs}"
    if isinstance(ours, dict | list):
        assert len(ours) == len(theirs), f"{where}: {ours} and {theirs}"
        keys = ours if isinstance(ours, dict) else range(len(ours))
        for key in keys:
            assert_alike(ours[key], theirs[key], f"{where}[{key!r}]")
    elif isinstance(ours, float):
        assert ours == pytest.approx(theirs, rel=1e-9), where
    else:
        assert ours == theirs, where


def data():
    x = torch.cos(torch.arange(SAMPLES * FEATURES, dtype=torch.float64).reshape(SAMPLES, FEATURES) ** 1.3)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True).tanh()), BATCH)


def run(make, size, options, steps=3):
    """What the module holds after two epochs, and what was logged."""
    ignore_warnings()
    module = make()
    pp = options.pop("pipeline_parallel_size", 1)
    trainer = trainer_of(size, pp, max_epochs=2, limit_train_batches=steps, strategy_options=options)
    trainer.fit(module, data(), data() if type(module).validation_step is not LightningModule.validation_step else None)
    weights = {name: parameter.tolist() for name, parameter in module.named_parameters()}
    return kept_by(module), {name: float(value) for name, value in trainer.callback_metrics.items()}, weights
