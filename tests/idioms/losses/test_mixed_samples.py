"""Objectives that mix the samples of a batch are detected, with both numbers."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from harness.trainer_runs import trainer_of
from models.regression import FEATURES, Regressor, mlp, regression_data
from models.unpipelined import Branching, Contrasts, SomeRows

PP, TP = {"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2, "num_microbatches": 2}


class Straight(Regressor):
    """Two layers more than stages."""

    def __init__(self):
        super().__init__()
        self.body, self.head = mlp(), nn.Linear(FEATURES, 1)

    def forward(self, x):
        return self.head(self.body(x))


class Pairs(Straight):
    training_step = Contrasts.training_step


class Correlates(Straight):
    """Normalizes over its batch in every mode, which fails for a single sample."""

    def training_step(self, batch, batch_idx):
        x, _ = batch
        h = F.batch_norm(self.body(x), None, None, training=True)
        return ((h.T @ h) / len(x) - torch.eye(h.shape[1])).square().sum() + self.head(h).square().mean()


class Center(nn.Module):
    """Takes a running mean of its inputs from them, which counts these already."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(FEATURES))

    def forward(self, x):
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.5)
        return x - self.mean


class OwnCenter(Straight):
    """The buffer is the module's own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(FEATURES))

    def forward(self, x):
        return self.head(Center.forward(self, self.body(x)))


class CenterLayer(Straight):
    """The buffer is that of a layer."""

    def __init__(self):
        super().__init__()
        self.center = Center()

    def forward(self, x):
        return self.head(self.center(self.body(x)))


class Rows(Straight):
    """A pipeline recognises its mean, and weighs microbatches by it."""

    training_step = SomeRows.training_step


def warned(module_class, options):
    torch.manual_seed(0)
    given = dict(options)
    trainer = trainer_of(2, given.pop("pipeline_parallel_size", 1), strategy_options=given, precision="64-true")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module_class(), regression_data()["train_dataloaders"])
    texts = [str(warning.message) for warning in caught]
    return trainer.strategy.run.shared_last_batch, [t for t in texts if "mixes samples" in t or "no memory" in t]


MIXED = {
    "shares": (Branching, PP, True, ""),
    "contrasts in shares": (Contrasts, PP, False, "So batches are not split"),
    "rows in shares": (SomeRows, PP, False, "So batches are not split"),
    "microbatches": (Branching, TP, False, ""),
    "contrasts in microbatches": (Contrasts, TP, False, "So batches are not split"),
    "stages": (Straight, PP, False, ""),
    "contrasts in stages": (Pairs, PP, False, "So batches are not split"),
    "correlations in stages": (Correlates, PP, False, "So batches are not split"),
    "rows in stages": (Rows, PP, False, ""),
    "own buffer in stages": (OwnCenter, PP, False, "So batches are not split"),
    "own buffer in microbatches": (OwnCenter, TP, False, "So batches are not split"),
    "buffer of a layer in stages": (CenterLayer, PP, False, "So batches are not split"),
    "buffer of a layer in microbatches": (CenterLayer, TP, False, "So batches are not split"),
}


@pytest.mark.parametrize("case", MIXED)
def test_first_batch_detects_objectives_that_mix_samples(worlds, case):
    module, options, in_shares, text = MIXED[case]
    first, second = worlds.run(2, warned, module, options)
    assert first[0] == second[0] == in_shares and second[1] == []
    assert len(first[1]) == bool(text) and all(text in message for message in first[1]), first[1]


class Series(Straight):
    """Its samples are series, which the model takes together: fewer of them broadcast against the others' targets."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        mask = torch.ones_like(y)
        found = self(x).T  # one row of all series
        return ((found - y).abs() * mask).sum() / mask.sum()


class WithBalance(Straight):
    """A mean over some rows beside one over the samples: each is weighted correctly."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self(x)
        return F.mse_loss(out[y > 0.2], y[y > 0.2]) + out.square().mean()


class NeedsMemory(Straight):
    """Two microbatches at once do not fit on one rank."""

    def training_step(self, batch, batch_idx):
        if len(batch[0]) > 2:
            raise torch.OutOfMemoryError("for a full batch")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("module", "count"), [(Series, 1), (WithBalance, 0), (NeedsMemory, 1)])
def test_stages_warn_if_the_loss_is_no_mean(worlds, module, count):
    first, second = worlds.run(2, warned, module, PP)
    assert len(first[1]) == count and second[1] == [], first[1]


class ClassWeights(Straight):
    """A mean over class weights, which are no count in the batch."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(FEATURES, 3)
        self.register_buffer("weight", torch.tensor([0.5, 1.0, 20.0]))

    def training_step(self, batch, batch_idx):
        x, y = batch
        labels = (y[:, 0] > 0).long() + (y[:, 0] > 0.6).long()
        loss = F.cross_entropy(self.head(self.body(x)), labels, weight=self.weight)
        self.log("loss", loss)
        return loss


def logged_with_warnings(options):
    torch.manual_seed(0)
    trainer = trainer_of(2, 2, strategy_options=options, precision="64-true", max_epochs=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(ClassWeights(), regression_data()["train_dataloaders"])
    return [str(warning.message) for warning in caught if "logs 'loss'" in str(warning.message)]


def test_logged_means_of_recorded_weights_are_not_warned_of(worlds):
    assert worlds.run(2, logged_with_warnings, {"num_microbatches": 4}) == [[], []]
