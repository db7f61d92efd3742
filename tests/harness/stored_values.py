"""A module whose steps store values, a fit of it, and the comparison of what two fits stored."""

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


class StoresValues(LightningModule):
    """Each test defines what its step stores; `stored_values` is compared."""

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
        self.store(loss, out, batch, batch_idx)
        return loss

    def store(self, loss, out, batch, batch_idx):
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


def stored_values(module):
    """The attributes of the module, as plain lists and dicts."""
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


def assert_equal(actual, expected, where="self"):
    assert type(actual) is type(expected), f"{where}: {actual} and {expected}"
    if isinstance(actual, dict | list):
        assert len(actual) == len(expected), f"{where}: {actual} and {expected}"
        keys = actual if isinstance(actual, dict) else range(len(actual))
        for key in keys:
            assert_equal(actual[key], expected[key], f"{where}[{key!r}]")
    elif isinstance(actual, float):
        assert actual == pytest.approx(expected, rel=1e-9), where
    else:
        assert actual == expected, where


def data():
    x = torch.cos(torch.arange(SAMPLES * FEATURES, dtype=torch.float64).reshape(SAMPLES, FEATURES) ** 1.3)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True).tanh()), BATCH)


def run(make, size, options, steps=3):
    """Attributes of the module after two epochs, logged values, and weights."""
    ignore_warnings()
    module = make()
    pp = options.pop("pipeline_parallel_size", 1)
    trainer = trainer_of(size, pp, max_epochs=2, limit_train_batches=steps, strategy_options=options)
    trainer.fit(module, data(), data() if type(module).validation_step is not LightningModule.validation_step else None)
    weights = {name: parameter.tolist() for name, parameter in module.named_parameters()}
    return stored_values(module), {name: float(value) for name, value in trainer.callback_metrics.items()}, weights
