"""Idioms of published packages, each of which failed under some layout, match plain Lightning."""

import pytest
import torch
import torchmetrics
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from harness.trainer_runs import trainer_of
from lightning_hybrid.batch.split import choose_count

FEATURES, SAMPLES = 4, 32


class Base(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(*(nn.Linear(FEATURES, FEATURES) for _ in range(4)))
        self.head = nn.Linear(FEATURES, 1)

    def forward(self, x):
        return self.head(self.body(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.mse_loss(self(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Coverage(torchmetrics.Metric):
    """Counts in plain attributes."""

    def __init__(self):
        super().__init__()
        self.covered, self.total = 0, 0

    def update(self, found, wanted):
        self.covered += int((found * wanted > 0).sum())
        self.total += len(wanted)

    def compute(self):
        return torch.tensor(self.covered / self.total)


class PlainCounts(Base):
    def __init__(self):
        super().__init__()
        self.metrics = torchmetrics.MetricCollection({"coverage": Coverage()})

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.metrics(self(x), y)

    def on_validation_epoch_end(self):
        self.log_dict(self.metrics.compute())
        self.metrics.reset()


class PairAccuracy(torchmetrics.MeanMetric):
    """A mean with extra arguments."""

    def update(self, found, wanted):
        super().update((found * wanted > 0).double())


class CustomMean(Base):
    def __init__(self):
        super().__init__()
        self.pairs = PairAccuracy()

    def training_step(self, batch, batch_idx):
        x, y = batch
        found = self(x)
        self.pairs(found, y)
        self.log("pairs", self.pairs, on_step=False, on_epoch=True)
        return F.mse_loss(found, y)


class Columns(Base):
    """Binds a buffer to a column of a matrix."""

    def __init__(self):
        super().__init__()
        self.register_buffer("axis", torch.ones(FEATURES))

    def training_step(self, batch, batch_idx):
        self.axis = torch.linalg.eigh(batch[0].T @ batch[0])[1][:, 0]
        return super().training_step(batch, batch_idx)


class Moves(Base):
    """Moves its layers again in `configure_optimizers`."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(FEATURES, FEATURES, batch_first=True)

    def forward(self, x):
        return super().forward(self.lstm(x[:, None])[0][:, 0])

    def configure_optimizers(self):
        self.body, self.lstm = self.body.to(self.device), self.lstm.to(self.device)
        return super().configure_optimizers()

    def on_train_start(self):
        self.head.to(self.device)


class Padded:
    """The value that layers pass on."""

    def __init__(self, payload, lengths):
        self._payload, self._lengths = payload, lengths

    @property
    def payload(self):
        return self._payload


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)

    def forward(self, x):
        return Padded(self.linear(x.payload).tanh(), x._lengths)


class PassesPadded(Base):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*(Layer() for _ in range(4)))

    def forward(self, x):
        return self.head(self.body(Padded(x, None)).payload)


class NoParameters(LightningModule):
    """Its weights have become buffers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.linspace(-1, 1, FEATURES)[:, None])

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val", F.mse_loss(x @ self.weight, y))


class OfSeveral(Base):
    """Its metric needs two samples."""

    def __init__(self):
        super().__init__()
        self.r2 = torchmetrics.R2Score()

    def validation_step(self, batch, batch_idx):
        x, y = batch
        if len(x) > 1:
            self.r2(self(x), y)

    def on_validation_epoch_end(self):
        self.log("r2", self.r2.compute())
        self.r2.reset()


def run(module_class, options):
    torch.manual_seed(1)
    x = torch.randn(SAMPLES, FEATURES)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True).tanh()), 8)
    if options is None:
        quiet = dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "logger"), False)
        trainer = Trainer(accelerator="cpu", max_epochs=2, **quiet)
    else:
        given = dict(options)
        trainer = trainer_of(2, given.pop("pipeline_parallel_size", 1), strategy_options=given, max_epochs=2)
    module = module_class()
    if module_class is NoParameters:
        trainer.validate(module, loader, verbose=False)
    else:
        trainer.fit(module, loader, loader if hasattr(module_class, "on_validation_epoch_end") else None)
    logged = {key: float(value) for key, value in trainer.callback_metrics.items()}
    return (
        [value.detach().clone() for value in module.state_dict().values()],
        logged,
        options is not None and trainer.strategy.run.fallback is not None,
    )


PP, TP = {"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}
MODULES = [PlainCounts, CustomMean, Moves, PassesPadded, NoParameters, OfSeveral]


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("options", [PP, {**PP, "num_microbatches": 2}, TP], ids=str)
def test_matches_plain_lightning(worlds, module, options):
    [(expected, metrics, _)] = worlds.run(1, run, module, None)
    for found, logged, is_sharded in worlds.run(2, run, module, options):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert logged == pytest.approx(metrics, rel=1e-4)
        assert not (is_sharded and options is not TP)


def test_strided_buffers_of_replicas(worlds):
    """They equal those of replica 0 before each step; the last step writes local values."""
    (first, *_), (second, *_) = worlds.run(2, run, Columns, {"data_parallel_size": 2})
    torch.testing.assert_close(first[1:], second[1:])
    assert first[0].shape == second[0].shape == (FEATURES,)


@pytest.mark.parametrize(
    ("samples", "stages", "count"), [(8, 2, 4), (4, 2, 2), (3, 2, 3), (64, 2, 8), (7, 2, 3), (1, 2, 1)]
)
def test_microbatches_have_two_samples_if_possible(samples, stages, count):
    assert choose_count(torch.zeros(samples, 2), None, stages, None) == count
