"""Metrics see full batches, whatever they decide by the content of an update; logged values are those of batches."""

import math
import re
import warnings

import pytest
import torch
import torchmetrics
from torch import nn
from torch.nn import functional as F
from torchmetrics.classification import (
    BinaryAUROC,
    BinaryAveragePrecision,
    BinaryCalibrationError,
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassCalibrationError,
)
from torchmetrics.wrappers import ClasswiseWrapper, MetricTracker, MinMaxMetric, MultioutputWrapper

from harness.trainer_runs import ignore_warnings, trainer_of
from models.tiny import FEATURES, Tiny, loader

CLASSES = 3


def metrics():
    one, two = BinaryAUROC(thresholds=6), BinaryAveragePrecision(thresholds=6)
    return nn.ModuleDict(
        {
            "auroc": BinaryAUROC(),
            "calibration": BinaryCalibrationError(n_bins=4),
            "classes": MulticlassAUROC(CLASSES),
            "class_calibration": MulticlassCalibrationError(CLASSES, n_bins=4),
            "top": MulticlassAccuracy(CLASSES, top_k=2),
            "grouped": torchmetrics.MetricCollection({"one": one, "two": two}),
            "extremes": MinMaxMetric(BinaryAUROC()),
            "by_class": ClasswiseWrapper(MulticlassAUROC(CLASSES, average=None)),
            "outputs": MultioutputWrapper(torchmetrics.R2Score(), CLASSES),
            "ranks": torchmetrics.SpearmanCorrCoef(),
            "sum": torchmetrics.SumMetric(),
            "mean": torchmetrics.MeanMetric(),
            "largest": torchmetrics.MaxMetric(),
            "samples": torchmetrics.SumMetric(),
            "running": torchmetrics.RunningMean(3),
            "tracked": MetricTracker(torchmetrics.MeanSquaredError(), maximize=False),
        }
    )


class Measures(Tiny):
    """Its logits are probabilities in half of each batch."""

    calls = "update"

    def __init__(self):
        super().__init__()
        self.layers[-1] = nn.Linear(FEATURES, CLASSES).double()
        self.of_train, self.of_val, self.seen = metrics(), metrics(), []

    def step(self, batch, metrics):
        out = self(batch["x"]) + 0.3
        out = torch.where(batch["index"][:, None] % 8 < 4, out.sigmoid(), out * 3)
        loss, y = F.mse_loss(out, batch["y"].expand_as(out)), batch["y"][:, 0]
        binary, classes = (out[:, 0], (y > 0.3).long()), (out, batch["index"] % CLASSES)
        own = {"outputs": (out, batch["y"] + torch.arange(CLASSES)), "ranks": (out[:, 0], y)}
        own |= {
            "samples": (len(y),),
            "tracked": (out[:, 0], y),
            **dict.fromkeys(("sum", "mean", "largest", "running"), (loss.detach(),)),
        }
        own |= dict.fromkeys(("classes", "class_calibration", "top", "by_class"), classes)
        for name, metric in metrics.items():
            value = getattr(metric, self.calls)(*own.get(name, binary))
            for key, one in value.items() if isinstance(value, dict) else [("", value)]:
                if isinstance(one, torch.Tensor) and one.numel() == 1:
                    self.log(name + key, one, on_step=self.training, on_epoch=not self.training)
        return loss

    def on_train_epoch_start(self):
        self.of_train["tracked"].increment()  # a new metric

    def on_validation_epoch_start(self):
        self.of_val["tracked"].increment()

    def training_step(self, batch, batch_idx):
        return self.step(batch, self.of_train)

    def validation_step(self, batch, batch_idx):
        self.step(batch, self.of_val)

    def on_train_batch_end(self, *_):
        self.seen += [float(value) for name, value in sorted(self.trainer.callback_metrics.items())]

    def compute(self, metrics):
        for metric in metrics.values():
            value = metric.compute()
            values = value.values() if isinstance(value, dict) else [value]
            self.seen += [float(one.double().sum()) for one in values]
            metric.reset()

    def on_validation_epoch_end(self):
        self.compute(self.of_val)

    def on_train_epoch_end(self):
        self.compute(self.of_train)


class CallsForward(Measures):
    calls = "forward"


class InShares(CallsForward):
    """Branches on a value: ranks run shares of batches."""

    def forward(self, x):
        hidden = self.layers[:-1](x)
        return self.layers[-1](hidden) if hidden.abs().mean().item() < 10 else self.layers[-1](2 * hidden)


class Logs(Tiny):
    """Logs the loss, a count and a maximum with each reduction, as tensors and as Python numbers."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def values(self, loss, out):
        largest = out.detach().max()
        yield from {"loss": loss, "count": (out > 0.05).sum(), "largest": largest, "constant": 3.5}.items()
        ones = torch.ones_like(out[:, 0], dtype=torch.int64).sum()
        yield from {"item": loss.item(), "largest item": float(largest), "ones": ones}.items()

    def step(self, batch, where):
        out = self(batch["x"])
        loss = F.mse_loss(out, batch["y"])
        for name, value in self.values(loss, out):
            for reduce in ("mean", "max", "min", "sum", torch.max):
                key = f"{where} {name} {reduce}"
                self.log(key, value, reduce_fx=reduce, on_step=True, on_epoch=True, sync_dist=True)
        if self.counts:
            self.log(f"{where} samples", float(len(out)), reduce_fx="sum", on_step=False, on_epoch=True)
        return loss

    counts = True

    def training_step(self, batch, batch_idx):
        return self.step(batch, "train")

    def validation_step(self, batch, batch_idx):
        self.step(batch, "val")

    def on_train_epoch_end(self):
        logged = self.trainer.callback_metrics
        self.seen = [float(value) for name, value in sorted(logged.items()) if name.startswith("val")]

    def on_fit_end(self):
        self.seen += [float(value) for name, value in sorted(self.trainer.callback_metrics.items())]


class LogsItems(Logs):
    """Logs numbers that it reads from the model, and none whose value differs in the traces of batch and parts."""

    counts = False

    def values(self, loss, out):
        yield "item", loss.item()


class LogsFunctions(Logs):
    """Logs functions of the loss and of sums, of torch and of Python, whose numbers no microbatch has."""

    samples = 30  # the microbatches of the last batch are smaller

    def values(self, loss, out):
        yield from {"tensor": loss.exp(), "item": loss.exp().item(), "ratio": float(loss / (1 + loss))}.items()
        yield from {"python": math.exp(loss.item()), "rounded": round(100 * loss.item(), 1)}.items()
        positive = out.detach() > 0.05
        sums = (positive * out.detach()).sum() / (1 + positive.sum())
        yield from {"sums": sums, "positive": positive.sum().item(), "ones": torch.ones_like(out[:, 0]).sum()}.items()
        yield from {"size": len(out), "two": 2 * len(out), "shape": out.shape[0] / 4}.items()


class LogsBatch(Logs):
    """Logs what it computes from the batch alone."""

    def step(self, batch, where):
        self.y = batch["y"]
        return super().step(batch, where)

    def values(self, loss, out):
        y, self.y = self.y, None
        yield from {"spread": y.std(), "median": y.median().item(), "sum": float(y.sum()), "mean": y.mean()}.items()


class LogsRatios(LogsBatch):
    """Logs sums over a number of the batch that is equal in all microbatches, a sum, and one over weights alone."""

    def values(self, loss, out):
        mask, self.y = (torch.arange(len(self.y)) % 2).to(out)[:, None], None
        total = (out.square() * mask).sum()
        yield from {"masked": total / mask.sum(), "clamped": total / mask.sum().clamp(min=1)}.items()
        yield from {"share": (out > 0.05).sum() / len(out), "per_number": total / out.numel()}.items()
        yield from {"errors": F.mse_loss(out, mask, reduction="sum"), "root": (out.mean() + 9).sqrt() / 2}.items()
        yield "weights", sum(parameter.square().sum() for parameter in self.parameters())


def run(module, size, pp, batch_size, options, *, ignores=True):
    if ignores:
        ignore_warnings()
    torch.manual_seed(3)
    model = module()
    trainer = trainer_of(size, pp, strategy_options=options, num_sanity_val_steps=0)
    count = getattr(model, "samples", 32)
    trainer.fit(model, loader(batch_size, count), loader(batch_size, count))
    return model.seen


HALVES = {"num_microbatches": 2}
LAYOUTS = {"microbatches": (1, 1, HALVES), "pp2": (2, 2, HALVES), "dp2 x pp2": (4, 2, HALVES)}
LAYOUTS["pp2, 4 microbatches"] = (2, 2, {"num_microbatches": 4})
CASES = [(CallsForward, "microbatches"), (CallsForward, "pp2"), (InShares, "pp2"), (Logs, "microbatches")]
CASES += [(Measures, "pp2"), (Logs, "dp2 x pp2"), (LogsFunctions, "pp2"), (LogsBatch, "pp2"), (LogsRatios, "pp2")]
CASES += [(LogsItems, "pp2")]
SLOW = [(Measures, "dp2 x pp2"), (Logs, "pp2"), (Logs, "pp2, 4 microbatches"), (CallsForward, "pp2, 4 microbatches")]
SLOW += [(CallsForward, "dp2 x pp2"), (InShares, "dp2 x pp2"), (Measures, "microbatches"), (InShares, "microbatches")]
SLOW += [(LogsFunctions, "pp2, 4 microbatches"), (LogsBatch, "dp2 x pp2")]


@pytest.mark.parametrize(
    ("module", "name"),
    [*(pytest.param(*case) for case in CASES), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_values_are_those_of_full_batches(worlds, module, name):
    size, pp, options = LAYOUTS[name]
    expected = worlds.run_once(size // pp, run, module, size // pp, 1, 8 * pp // size, {})
    for seen in worlds.run(size, run, module, size, pp, 8 * pp // size, options):
        assert seen == pytest.approx(expected[0], rel=1e-6, abs=1e-9) and len(seen) > 20


class LogsNoMeans(Logs):
    """Logs numbers of its output that no recording explains, and others that are explained."""

    def values(self, loss, out):
        out = out.detach()
        yield from {"loss": loss, "spread": out.std(), "python": math.exp(loss.item()), "size": len(out)}.items()
        yield from {"exp": loss.exp(), "largest": out.max(), "share": (out > 0).double().mean()}.items()

    def step(self, batch, where):
        out = self(batch["x"])
        loss = F.mse_loss(out, batch["y"])
        self.log_dict(dict(self.values(loss, out)))
        return loss


def run_warned(size, pp):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(LogsNoMeans, size, pp, 8, HALVES, ignores=False)
    texts = [str(each.message) for each in caught]
    return [re.search("logs '(\\w+)', which is", text)[1] for text in texts if "which is" in text]


@pytest.mark.parametrize(("size", "keys"), [(1, ["exp", "python", "spread"]), (2, ["spread"])])
def test_number_that_is_none_of_those_of_microbatches_is_named(worlds, size, keys):
    assert sorted(worlds.run(size, run_warned, size, size)[0]) == keys
