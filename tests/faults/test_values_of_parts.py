"""What parts of a batch do not show by themselves: sizes of means over replicas, NaN, writes into the batch."""

from __future__ import annotations

import math
from typing import Any

import torchmetrics
from faults.layouts import Case, Regression, check, each
from torch import Tensor, nn
from torch.nn import functional as F

REPLICATED = ("dp2", "zero3", "pp2 x dp2")
SPLIT = ("one device", "pp2", "pp2 x dp2", "dp2")


class MeanOverMask(Regression):
    """A mean with its own batch size, which replicas have differently; by epoch it is that of all entries."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, mask = batch
        out = self(x)
        squares = ((out - y).square() * mask).sum() / mask.sum()
        self.log("masked", squares.detach(), batch_size=int(mask.sum()), on_step=False, on_epoch=True, sync_dist=True)
        return F.mse_loss(out, y)


class OnSomeReplicas(MeanOverMask):
    """One more key in some batches of some replicas, so that keys are compared one by one."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch[0][0, 0] > 0:
            self.log("positive", 1.0, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.seen.append(float(self.trainer.callback_metrics["masked"]))


class HasNan(Regression):
    """Values that are NaN for one sample of the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.undefined = torchmetrics.MeanMetric(nan_strategy="disable")

    def values(self, batch: Any) -> Tensor:
        x, _, _ = batch
        largest = (x[:, :1] > self.limit).double()
        return self(x) + (1 - largest) * largest / (1 - largest)

    limit = 1.9

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        values = self.values(batch)
        self.undefined(values.float())
        self.log("undefined", self.undefined, on_step=False, on_epoch=True)
        for how in ("mean", "max", "min", "sum"):
            value = getattr(values, "amax" if how == "max" else "amin" if how == "min" else how)()
            self.log(how, value.detach(), on_step=True, on_epoch=True, reduce_fx=how, sync_dist=True)
        self.log("number", values.mean().item(), on_step=True, on_epoch=True, sync_dist=True)
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validated", self.values(batch).mean(), sync_dist=True)

    def on_train_batch_end(self, *args: Any) -> None:
        found = self.trainer.callback_metrics
        self.seen.append({name: math.isnan(found[name]) for name in sorted(found) if name != "validated"})

    def on_train_epoch_end(self) -> None:
        self.on_train_batch_end()

    def on_validation_epoch_end(self) -> None:
        self.seen.append(math.isnan(self.trainer.callback_metrics["validated"]))


class WritesBatch(Regression):
    """Normalises its batch in place, which a hook reads; no pipeline, since it branches on its loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch[0].mul_(0.5)
        loss = super().training_step(batch, batch_idx)
        assert loss is not None
        return loss if loss.item() < 1e6 else loss * 0

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(batch[0].sum().item())


class WritesLater(WritesBatch):
    """From the last batch on, which runs on shares until then."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx < 3:
            loss = self.loss(batch)
            return loss if loss.item() < 1e6 else loss * 0
        return super().training_step(batch, batch_idx)


class WritesBesideHook(WritesBatch):
    """With code in its backward, for which the first batch runs again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].register_full_backward_hook(keep)


def keep(module: nn.Module, grads: Any, outputs: Any) -> None:
    return None


LOGGED = ("logged", "seen")
CASES = {
    "sizes": Case(MeanOverMask, layouts=REPLICATED, compared=("logged",)),
    "sizes, other keys": Case(OnSomeReplicas, layouts=REPLICATED, compared=("seen",)),
    "NaN": Case(HasNan, layouts=SPLIT, validates=True, compared=("seen",)),
    "writes batch": Case(WritesBatch, layouts=("pp2", "tp2 x pp2", "one device")),
    "writes batch later": Case(WritesLater, layouts=("pp2", "one device")),
    "writes batch beside a hook": Case(WritesBesideHook, layouts=("one device", "pp2")),
}
DEFAULT = {
    "sizes": ("dp2",),
    "sizes, other keys": ("dp2",),
    "NaN": ("one device", "pp2"),
    "writes batch": ("pp2",),
    "writes batch later": ("pp2",),
    "writes batch beside a hook": ("one device",),
}


@each(CASES, DEFAULT)
def test_equals_one_process(worlds, tmp_path, case, layout):
    check(worlds, case, layout, tmp_path)
