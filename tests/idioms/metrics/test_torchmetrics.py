"""torchmetrics objects in every way that modules use them."""

import pytest
import torch
import torchmetrics
from torch import nn
from torch.nn import functional as F
from torchmetrics import functional as metrics_of

from harness.verification import all_layouts, check
from models.regression import FEATURES, Regressor, mlp


class Measured(Regressor):
    def __init__(self):
        super().__init__()
        self.body, self.head = mlp(), nn.Linear(FEATURES, 1)

    def forward(self, x):
        return self.head(self.body(x))


class LoggedObject(Measured):
    """Metric objects logged; one that syncs at each step; a collection with a prefix."""

    def __init__(self):
        super().__init__()
        self.error = torchmetrics.MeanSquaredError()
        both = torchmetrics.MetricCollection([torchmetrics.MeanAbsoluteError(), torchmetrics.MeanSquaredError()])
        self.scores = both.clone(prefix="val/")

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self(x)
        self.error(out, y)
        self.log("error", self.error, on_step=False, on_epoch=True)
        return F.mse_loss(out, y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.scores.update(self(x), y)
        self.log_dict(self.scores)


class Aggregated(Measured):
    """Means, maxima and sums of step values, with a manual compute at the end."""

    def __init__(self):
        super().__init__()
        self.mean, self.largest, self.total = (
            torchmetrics.MeanMetric(),
            torchmetrics.MaxMetric(),
            torchmetrics.SumMetric(),
        )

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.mean.update(loss.detach(), weight=len(batch[0]))
        self.largest.update(loss.detach())
        self.total.update(loss.detach())
        return loss

    def on_train_epoch_end(self):
        for name in ("mean", "largest", "total"):
            metric = getattr(self, name)
            self.log(f"epoch_{name}", metric.compute())
            metric.reset()


class Listing(Measured):
    """A metric whose state is lists."""

    def __init__(self):
        super().__init__()
        self.rank = torchmetrics.SpearmanCorrCoef()

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.rank.update(self(x).flatten(), y.flatten())

    def on_validation_epoch_end(self):
        self.log("rank", self.rank.compute())
        self.rank.reset()


class AsLoss(Measured):
    """A metric object is the loss."""

    def __init__(self):
        super().__init__()
        self.criterion = torchmetrics.MeanSquaredError().set_dtype(torch.float64)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return self.criterion(self(x), y)


class SyncsEachStep(Measured):
    def __init__(self):
        super().__init__()
        self.error = torchmetrics.MeanSquaredError(dist_sync_on_step=True)

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self(x)
        self.error(out, y)
        self.log("error", self.error, on_step=False, on_epoch=True)
        return F.mse_loss(out, y)


class AsFunctions(Measured):
    """Metrics and losses that validate their inputs, and one that writes by 0-dim masks."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self(x)
        right, target = out[:, 0], (y[:, 0] > 0).long()
        self.log("accuracy", metrics_of.accuracy(right.sigmoid(), target, task="binary"))
        self.log("f1", metrics_of.f1_score(right, target, task="binary"))
        self.log("precision", metrics_of.average_precision(right, target, task="binary", thresholds=5))
        self.log("r2", metrics_of.r2_score(right, y[:, 0]))
        self.log("likelihood", F.gaussian_nll_loss(right, y[:, 0], right.exp()))  # refuses variances below zero
        return F.mse_loss(out, y)

    def validation_step(self, batch, batch_idx):
        self.training_step(batch, batch_idx)


MODULES = [LoggedObject, Aggregated, Listing, AsLoss, SyncsEachStep, AsFunctions]


@all_layouts
@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_matches_one_process(worlds, module, layout):
    report = check(worlds, module, layout, steps=2)
    assert report.outcome == "same", str(report)
