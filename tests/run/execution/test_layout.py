"""Layouts that change in a run: a step that start hooks complete, and one that becomes unpipelinable."""

import copy

import pytest
import torch
import torchmetrics
from torch import nn
from torch.nn import functional as F

from harness.verification import COMBINED, LAYOUTS, TENSOR, check
from lightning_hybrid.verify import Layout
from models.regression import FEATURES, Regressor, mlp, regression_data

PP2, *_ = LAYOUTS
TP2 = Layout("tp2", devices=2, strategy={"tensor_parallel_size": 2})
ZERO = Layout("dp2 x pp2, ZeRO", devices=4, strategy={"pipeline_parallel_size": 2, "zero_stage": 2})
BY_LAYER = Layout(
    "dp2 x pp2, ZeRO by layer",
    devices=4,
    strategy={"pipeline_parallel_size": 2, "zero_stage": 3, "reshard_after_forward": True},
)
FOLDERS = Layout("pp2, folders", devices=2, strategy={"pipeline_parallel_size": 2, "save_distributed_checkpoint": True})
SHARDED = "sharded instead of"


class Network(Regressor):
    def __init__(self):
        super().__init__()
        self.body, self.head = mlp(), nn.Linear(FEATURES, 1)

    def forward(self, x):
        return self.head(self.body(x))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}]


class SetByFitStart(Network):
    """Uses values of the Trainer from the start of the fit."""

    def on_fit_start(self):
        self.scale = 0.5 + 0.1 * self.trainer.max_steps

    def training_step(self, batch, batch_idx):
        return self.scale * super().training_step(batch, batch_idx)


class SetByTrainStart(Network):
    """Sample weights that only the loader provides."""

    def on_train_start(self):
        self.weights = torch.linspace(0.5, 1.5, FEATURES, dtype=self.dtype, device=self.device)

    def forward(self, x):
        return super().forward(x * self.weights)


class SetByEpochStart(Network):
    def on_train_epoch_start(self):
        self.temperature = 0.5 / (1 + self.current_epoch)

    def forward(self, x):
        return super().forward(x) * self.temperature


class SetByBatchStart(Network):
    def on_train_batch_start(self, batch, batch_idx):
        self.shift = batch[0].mean(0)

    def forward(self, x):
        return super().forward(x - self.shift if self.training else x)


class Calibrated(Network):
    """Branches on values the first time."""

    def __init__(self):
        super().__init__()
        self.register_buffer("spread", torch.zeros(()))
        self.is_calibrated = False

    def forward(self, x):
        h = self.body(x)
        if not self.is_calibrated and self.training:
            self.spread.fill_(h.std().item())
            self.is_calibrated = True
        return self.head(h / (1 + self.spread))


class HeadOfTheStart(Network):
    """Without the hook another head is used, so the first cut does not contain this one."""

    def __init__(self):
        super().__init__()
        self.uses_second, self.second = False, nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 1))

    def on_train_start(self):
        self.uses_second = True

    def forward(self, x):
        return self.second(self.body(x)) if self.uses_second else self.head(x)


SETTLE = [
    *((module, PP2) for module in (SetByFitStart, SetByTrainStart, SetByEpochStart, SetByBatchStart, Calibrated)),
    *((SetByTrainStart, layout) for layout in (COMBINED, TENSOR, ZERO)),
    (HeadOfTheStart, PP2),
    (SetByTrainStart, TP2),
    (Calibrated, COMBINED),
]


def longer_data():
    return regression_data(num_train=96)


def named(value):
    return getattr(value, "__name__", None) or getattr(value, "name", None)


@pytest.mark.parametrize(("module", "layout"), SETTLE, ids=named)
def test_step_is_recorded_after_the_start_hooks(worlds, module, layout):
    report = check(worlds, module, layout, steps=4)
    assert report.outcome == "same" and SHARDED not in str(report), str(report)


class Decides(Network):
    """From the third batch on it branches on a value of the model."""

    def forward(self, x):
        h = self.body(x)
        if self.training and self.trainer.fit_loop.epoch_loop.total_batch_idx >= 2 and h.mean().item() < 10:
            h = 2 * h
        return self.head(h)


class DecidesForSome(Network):
    """Only batches of some kind do, which one replica has sooner than the other."""

    def forward(self, x):
        h = self.body(x)
        if self.training and self.trainer.global_step >= 1 and x[0, 0] > 0 and h.mean().item() < 10:
            h = 1 * h
        return self.head(h)


class Counts(Decides):
    """With metrics that have part of the epoch, and one with its own state."""

    def __init__(self):
        super().__init__()
        self.error, self.seen = torchmetrics.MeanAbsoluteError(), torchmetrics.MeanMetric()

    def training_step(self, batch, batch_idx):
        x, y = batch
        predicted = self(x)
        loss = F.mse_loss(predicted, y)
        self.error(predicted, y)
        self.seen(loss.detach())
        self.log("error", self.error, on_step=False, on_epoch=True)
        self.log("seen", self.seen, on_step=True, on_epoch=True)
        return loss


class Normed(Decides):
    """Statistics in buffers of its layers, and dropout."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(mlp(), nn.BatchNorm1d(FEATURES), mlp())


class StepsItself(Decides):
    """With a hook around the optimizer's step that reads the gradients of all layers."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)
        self.log("norm", torch.stack([p.grad.norm() for p in self.parameters()]).norm())

    def on_before_zero_grad(self, optimizer):
        gradients = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        self.log("old", torch.stack(gradients).sum() if gradients else 0.0)


class Momentum(torch.optim.Optimizer):
    """A user optimizer: stores a velocity, and scales by the norm over all gradients."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    velocity = self.state[p].setdefault("velocity", torch.zeros_like(p))
                    velocity.mul_(0.9).add_(p.grad / (1 + norm))
                    p.sub_(group["lr"] * velocity)
        return loss


class UserOptimizer(Decides):
    def configure_optimizers(self):
        return Momentum(self.parameters(), lr=0.05)


CHANGE = [
    *((module, PP2, {}) for module in (Decides, Counts, StepsItself, UserOptimizer)),
    (Normed, PP2, {"num_microbatches": 1}),
    (Normed, PP2, {}),
    *((Decides, layout, {}) for layout in (COMBINED, TENSOR, ZERO, FOLDERS)),
    (DecidesForSome, COMBINED, {}),
    (Decides, PP2, {"trainer": {"accumulate_grad_batches": 3}}),
    pytest.param(Decides, COMBINED, {"trainer": {"accumulate_grad_batches": 3}}, marks=pytest.mark.slow),
    pytest.param(Decides, ZERO, {"trainer": {"accumulate_grad_batches": 3}}, marks=pytest.mark.slow),
    (Decides, PP2, {"trainer": {"gradient_clip_val": 0.1}}),
    pytest.param(Decides, PP2, {"num_microbatches": 4}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("module", "layout", "options"), CHANGE, ids=lambda value: named(value) or str(value))
def test_unpipelinable_step_continues_sharded(worlds, module, layout, options):
    report = check(worlds, module, layout, make_data=longer_data, steps=6, **options)
    assert report.outcome == "same" and SHARDED in str(report), str(report)


# --- in the middle of a step -----------------------------------------------------------------------------------------


class Skips(Network):
    """The usual guard against a loss that is no number, which one batch has."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self(x), y)
        if self.trainer.fit_loop.epoch_loop.total_batch_idx == 3:
            loss = (loss - loss) / (loss - loss)  # NaN
        self.log("loss", torch.nan_to_num(loss.detach()))
        return torch.zeros_like(loss).requires_grad_() + 0 * self.head.bias.sum() if torch.isnan(loss) else loss


class SkipsWithTeacher(Skips):
    """Moves a copy of its layers along in the step, which must not move twice."""

    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(self.head).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            for old, new in zip(self.teacher.parameters(), self.head.parameters(), strict=True):
                old.mul_(0.9).add_(0.1 * new)
        return super().training_step(batch, batch_idx)


class Selects(Network):
    """Loops over the rows that the model selects: as many as in the first batch, then more."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        h = self.body(x)
        chosen = h[h.abs().sum(1) < (1000 if self.trainer.fit_loop.epoch_loop.total_batch_idx < 3 else 0)]
        loss = F.mse_loss(self.head(h), y)
        if len(chosen):
            loss = loss + 0.1 * h.pow(2).mean()
        self.log("loss", loss)
        return loss


class SelectsForSome(Network):
    """More rows in the batch of one replica only, while the other continues."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        h = self.body(x)
        is_late = self.trainer.fit_loop.epoch_loop.total_batch_idx == 3
        chosen = h[h.abs().sum(1) < (0 if is_late and x[0, 0] > 0 else 1000)]
        loss = F.mse_loss(self.head(h), y)
        if len(chosen):
            loss = loss + 0.1 * h.pow(2).mean()
        self.log("loss", loss)
        return loss


class CountsAndSelects(Selects):
    """Side effects of the microbatches before the failure are counted once."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(mlp(), nn.BatchNorm1d(FEATURES), mlp())
        self.error, self.steps, self.losses = torchmetrics.MeanAbsoluteError(), 0, []

    def training_step(self, batch, batch_idx):
        self.steps += 1
        self.error.update(batch[0][:, :1], batch[1])
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.detach())
        return loss

    def on_train_epoch_end(self):
        self.log_dict({"steps": float(self.steps), "error": self.error.compute(), "all": float(len(self.losses))})


class HooksAround(Selects):
    """The step is called from a hook of the user, who reads all gradients after it."""

    optimizer_step = StepsItself.optimizer_step
    on_before_zero_grad = StepsItself.on_before_zero_grad


BREAKS = [
    *((module, PP2, {}) for module in (Skips, Selects, HooksAround)),
    (SkipsWithTeacher, PP2, {"num_microbatches": 1}),
    (CountsAndSelects, PP2, {"num_microbatches": 1}),
    *((Selects, layout, {}) for layout in (COMBINED, TENSOR, ZERO, BY_LAYER)),
    *((module, layout, {}) for module in (Skips, SelectsForSome) for layout in (ZERO, BY_LAYER)),
    (SelectsForSome, COMBINED, {}),
    pytest.param(CountsAndSelects, BY_LAYER, {"num_microbatches": 1}, marks=pytest.mark.slow),
    pytest.param(Selects, ZERO, {"trainer": {"accumulate_grad_batches": 3}}, marks=pytest.mark.slow),
    pytest.param(SelectsForSome, BY_LAYER, {"trainer": {"accumulate_grad_batches": 4}}, marks=pytest.mark.slow),
    (Selects, PP2, {"trainer": {"accumulate_grad_batches": 3}}),
    pytest.param(Selects, COMBINED, {"trainer": {"accumulate_grad_batches": 4}}, marks=pytest.mark.slow),
    (Selects, Layout("zb", devices=2, strategy={"pipeline_parallel_size": 2, "schedule": "zero_bubble"}), {}),
]


@pytest.mark.parametrize(("module", "layout", "options"), BREAKS, ids=lambda value: named(value) or str(value))
def test_step_that_fails_midway_is_rerun_sharded(worlds, module, layout, options):
    report = check(worlds, module, layout, make_data=longer_data, steps=6, **{"num_microbatches": 2, **options})
    assert report.outcome == "same" and SHARDED in str(report), str(report)
