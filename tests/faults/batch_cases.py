"""What is not linear in a microbatch's loss: added gradients, masks, metrics, and how logged values are reduced."""

from __future__ import annotations

from typing import Any

import torch
import torchmetrics
from faults.layouts import FEATURES, Case, Regression, samples
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset
from torchmetrics.classification import (
    BinaryAccuracy,
    BinaryAUROC,
    BinaryCalibrationError,
    BinaryF1Score,
    MulticlassAUROC,
    MulticlassCalibrationError,
)

TOKENS = 5


def twins() -> Dataset:
    """Each sample twice, so that two replicas see the same, and masks that cut batches into uneven halves."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(14, FEATURES, generator=generator, dtype=torch.float64).repeat_interleave(2, 0)
    mask = (torch.rand(14, TOKENS, generator=generator) > 0.5).double()
    mask[::2, 0] = 1.0
    return TensorDataset(x, (x.sum(1, keepdim=True) / 2).tanh(), mask.repeat_interleave(2, 0))


# ---- E: code in the backward


class AddsGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, auxiliary: Tensor) -> Tensor:
        ctx.like = torch.ones_like(auxiliary)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, 0.3 * ctx.like


class PullsToZero(torch.autograd.Function):
    """Adds the gradient of a penalty on the hidden tensor itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient + 0.5 * x / x.shape[0]


class Reverses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return -ctx.factor * gradient, None


class Rounds(torch.autograd.Function):
    """Passes gradients straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 8).round() / 8

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.router = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.linear(x))
        weights = self.router(h).softmax(-1)
        return AddsGradient.apply(h * weights.amax(-1, keepdim=True), weights.square().mean())


class Routers(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Routed() for _ in range(4))


class Hidden(Regression):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = PullsToZero.apply(layer(x))
        return self.head(x)


class Adversary(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.domain = nn.Linear(FEATURES, 1)

    def loss(self, batch: Any) -> Tensor:
        x, y, mask = batch
        for layer in self.layers:
            x = layer(x)
        domain = F.binary_cross_entropy_with_logits(self.domain(Reverses.apply(x, 0.7)), mask[:, :1])
        return F.mse_loss(self.head(x), y) + domain


class Quantized(Regression):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = Rounds.apply(layer(x))
        return self.head(x)


# ---- F: a sum over what a mask selects, divided by a number of the batch


class Masked(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(FEATURES, TOKENS)

    def loss(self, batch: Any) -> Tensor:
        x, y, mask = batch
        return self.reduced((self(x) - y).square(), mask)

    def reduced(self, each: Tensor, mask: Tensor) -> Tensor:
        return (each * mask).sum() / mask.sum()


class TimesWorldSize(Masked):
    """The count of all ranks, as recipes for replicas have it."""

    def reduced(self, each: Tensor, mask: Tensor) -> Tensor:
        count = self.all_gather(mask.sum()).sum()
        return (each * mask).sum() * self.trainer.world_size / count


class AllReduced(Masked):
    def reduced(self, each: Tensor, mask: Tensor) -> Tensor:
        count = mask.sum()
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(count)
        return (each * mask).sum() * self.trainer.world_size / count


class TimesConstant(Masked):
    def reduced(self, each: Tensor, mask: Tensor) -> Tensor:
        return 2.5 * (each * mask).sum() / (mask.sum() * 1.5)


class Clamped(Masked):
    def reduced(self, each: Tensor, mask: Tensor) -> Tensor:
        return (each * mask).sum() / mask.sum().clamp(min=1) + 1e-3 * each.mean()


class WithEpsilon(Masked):
    def reduced(self, each: Tensor, mask: Tensor) -> Tensor:
        return torch.where(mask > 0, each, 0.0).sum() / (mask.sum() + 1e-12)  # replicas have half the sum


class OverTokens(Masked):
    """A mean of each sample."""

    def reduced(self, each: Tensor, mask: Tensor) -> Tensor:
        return ((each * mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean()


class OverSamples(Masked):
    """A mean of each position over the samples: no count of a microbatch alone gives it."""

    def reduced(self, each: Tensor, mask: Tensor) -> Tensor:
        return ((each * mask).sum(0) / mask.sum(0).clamp(min=1)).sum()


class MeanByMean(Masked):
    def reduced(self, each: Tensor, mask: Tensor) -> Tensor:
        return (each * mask).mean() / mask.mean()


class Selected(Masked):
    def reduced(self, each: Tensor, mask: Tensor) -> Tensor:
        return each[mask.bool()].mean() + 0.1 * torch.masked_select(each, mask > 0).mean()


class ByItem(Masked):
    def reduced(self, each: Tensor, mask: Tensor) -> Tensor:
        return (each * mask).sum() / max(int(mask.sum()), 1)


# ---- G: metrics that decide by the content of an update


class Measures(Regression):
    """Given logits of which some batches' halves look like probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.of_train, self.of_val = self.metrics(), self.metrics()
        self.classes = nn.Linear(FEATURES, 3)

    def metrics(self) -> nn.ModuleDict:
        one = {"auroc": BinaryAUROC(), "calibration": BinaryCalibrationError(n_bins=5), "accuracy": BinaryAccuracy()}
        binned = torchmetrics.MetricCollection({"f1": BinaryF1Score(), "binned": BinaryAUROC(thresholds=7)})
        many = {"classes": MulticlassAUROC(3), "class calibration": MulticlassCalibrationError(3, n_bins=5)}
        return nn.ModuleDict({**one, "binned": binned, **many})

    def step(self, batch: Any, metrics: nn.ModuleDict, name: str) -> Tensor:
        x, y, _ = batch
        h = x
        for layer in self.layers:
            h = layer(h)
        out, classes = self.head(h), self.classes(h)
        # Large where the first input is positive, else between 0 and 1.
        sure = torch.where(x[:, :1] > 0.5, out * 4, out.sigmoid())
        for key, metric in metrics.items():
            many = "class" in key
            given = (classes.softmax(-1) + (x[:, :1] > 0.5), (y[:, 0] > 0).long()) if many else (sure, (y > 0).long())
            metric.update(*given)
            if isinstance(metric, torchmetrics.MetricCollection):
                self.log_dict({f"{name} {k}": m for k, m in metric.items()}, on_step=False, on_epoch=True)
            else:
                self.log(f"{name} {key}", metric, on_step=False, on_epoch=True)
        return F.mse_loss(out, y) + classes.square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.step(batch, self.of_train, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.step(batch, self.of_val, "val")


class ComputesItself(Measures):
    """Updates in steps, and computes in hooks."""

    def step(self, batch: Any, metrics: nn.ModuleDict, name: str) -> Tensor:
        x, y, _ = batch
        out = self(x)
        for key in ("auroc", "calibration", "accuracy"):
            metrics[key](torch.where(x[:, :1] > 0.5, out * 4, out.sigmoid()), (y > 0).long())
        return F.mse_loss(out, y)

    def compute(self, metrics: nn.ModuleDict) -> None:
        for key in ("auroc", "calibration", "accuracy"):
            self.seen.append(float(metrics[key].compute()))
            metrics[key].reset()

    def on_validation_epoch_end(self) -> None:
        self.compute(self.of_val)

    def on_train_epoch_end(self) -> None:
        self.compute(self.of_train)


# ---- H: how values of batches are reduced


class Reduces(Regression):
    """Values that replicas of the same samples have alike, so any reduction over replicas gives one process's."""

    functions: tuple[Any, ...] = ("mean", "max", "min", torch.max, torch.min, torch.mean)

    def log_all(self, batch: Any, where: str) -> Tensor:
        x, y, _ = batch
        out = self(x)
        loss = F.mse_loss(out, y)
        values = {"loss": loss, "largest": out.max(), "hidden": out.square().mean().sqrt(), "item": loss.item()}
        for name, value in values.items():
            for number, function in enumerate(self.functions):
                key = f"{where} {name} {number}"
                self.log(key, value, reduce_fx=function, on_step=False, on_epoch=True, sync_dist=self.syncs)
        return loss

    syncs = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.log_all(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log_all(batch, "val")


class ReducesEach(Reduces):
    """Without a word about replicas."""

    syncs = False


class Sums(Reduces):
    """Sums, which replicas add up."""

    def log_all(self, batch: Any, where: str) -> Tensor:
        x, y, _ = batch
        out = self(x)
        self.log(f"{where} sum", out.square().sum(), reduce_fx="sum", on_step=False, on_epoch=True, sync_dist=True)
        self.log(f"{where} hits", (out > 0).sum(), reduce_fx="sum", on_step=False, on_epoch=True, sync_dist=True)
        self.log(f"{where} n", float(len(x)), reduce_fx="sum", on_step=False, on_epoch=True, sync_dist=True)
        self.log(f"{where} last", out.min(), reduce_fx="min", on_step=True, on_epoch=True, sync_dist=True)
        return F.mse_loss(out, y)


# ---- I, J: metrics that are saved with the hyperparameters, and those that replicas update differently often


class KeepsMetric(Regression):
    def __init__(self, metric: torchmetrics.Metric, loss: nn.Module, metrics: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.metric, self.own = metric, loss
        self.others = torchmetrics.MetricCollection(metrics or [torchmetrics.MeanSquaredError()])

    def loss(self, batch: Any) -> Tensor:
        x, y, _ = batch
        out = self(x)
        self.metric(out, y)
        self.others.update(out, y)
        self.log("metric", self.metric, on_step=False, on_epoch=True)
        return self.own(out, y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    def on_train_epoch_end(self) -> None:
        self.seen += [float(value) for value in self.others.compute().values()]
        self.others.reset()


def keeps_metric() -> KeepsMetric:
    return KeepsMetric(torchmetrics.MeanAbsoluteError(), nn.MSELoss())


def keeps_collection() -> KeepsMetric:
    metrics = [torchmetrics.MeanAbsoluteError(), torchmetrics.R2Score()]
    return KeepsMetric(torchmetrics.MeanAbsoluteError(), nn.L1Loss(), metrics)


class Collected(torchmetrics.Metric):
    """A list of values, which nothing concatenates."""

    full_state_update = False

    def __init__(self, reduce: str | None = None) -> None:
        super().__init__()
        self.add_state("values", [], dist_reduce_fx=reduce)

    def update(self, values: Tensor) -> None:
        self.values.append(values)

    def compute(self) -> Tensor:
        values = (
            [value.flatten() for value in self.values] if isinstance(self.values, list) else [self.values.flatten()]
        )
        return torch.cat(values).square().mean()


class UpdatesDifferently(Regression):
    """A replica measures its large samples alone, in batches in which it has any."""

    reduce: str | None = None

    def __init__(self) -> None:
        super().__init__()
        self.collected = Collected(self.reduce)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y, _ = batch
        error = self(x) - y
        large = x[:, 0] > 1.0
        if large.any():
            self.collected.update(error[large])

    def on_validation_epoch_end(self) -> None:
        self.seen.append(float(self.collected.compute()))
        self.collected.reset()


class MeasuresMasked(Regression):
    """Measures what a mask selects, which in some batches is as much in each microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.error, self.mean = torchmetrics.MeanSquaredError(), torchmetrics.MeanMetric()
        self.total = torchmetrics.SumMetric()

    def loss(self, batch: Any) -> Tensor:
        x, y, mask = batch
        out, selected = self(x), mask[:, 0] > 0
        self.error.update(out[selected], y[selected])
        self.mean.update((out - y)[selected].abs())
        self.total.update(selected.sum())
        self.log_dict({"error": self.error, "mean": self.mean, "total": self.total}, on_step=False, on_epoch=True)
        return F.mse_loss(out, y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y, _ = batch
        self.log("val_loss", F.mse_loss(self(x), y), sync_dist=True)


class Concatenates(UpdatesDifferently):
    reduce = "cat"


REPLICATED = ("dp2", "zero1", "zero2", "zero3", "zero3 layerwise", "pp2 x dp2", "zero3 x recompute")
SINGLE = 1e-6  # metrics of torchmetrics sum in float32
CASES = {
    "E routers": Case(Routers),
    "E hidden": Case(Hidden),
    "E reversal": Case(Adversary),
    "E straight through": Case(Quantized),
    **{
        f"F {kind.__name__}": Case(kind, data=twins, validates=True)
        for kind in (
            Masked,
            TimesWorldSize,
            AllReduced,
            TimesConstant,
            Clamped,
            WithEpsilon,
            OverTokens,
            OverSamples,
            MeanByMean,
            Selected,
            ByItem,
        )
    },
    "G logged": Case(Measures, data=twins, validates=True, tolerance=SINGLE),
    "G computed": Case(ComputesItself, data=twins, validates=True, tolerance=SINGLE),
    "G masked": Case(MeasuresMasked, tolerance=SINGLE),
    "H synced": Case(Reduces, data=twins, validates=True),
    "H not synced": Case(ReducesEach, data=twins, validates=True),
    "H sums": Case(Sums, data=samples, validates=True),
    "I metric": Case(keeps_metric, saves=True, weights_only=False, tolerance=SINGLE),
    "I collection": Case(keeps_collection, saves=True, weights_only=False, tolerance=SINGLE),
    "J lists": Case(UpdatesDifferently, validates=True, refused=dict.fromkeys(REPLICATED, "RanksDisagree")),
    "J concatenated": Case(Concatenates, validates=True),
}
