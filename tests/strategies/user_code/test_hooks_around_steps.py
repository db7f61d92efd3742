"""Overridden hooks around steps (optimizer's, scheduler's, backward) read and write the full model."""

import copy

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from harness.layouts import each_under_sizes
from harness.trainer_runs import assert_same, ignore_warnings, trainer_of, weights_of
from models.tiny import Tiny, loader


class Averaging(Tiny):
    """A moving average of the layers; it is on the last stage, which validates it."""

    def __init__(self):
        super().__init__()
        self.average = copy.deepcopy(self.layers).requires_grad_(False)
        self.recorded = []

    def follow(self):
        with torch.no_grad():
            for averaged, other in zip(self.average.parameters(), self.layers.parameters(), strict=True):
                averaged.mul_(0.7).add_(other, alpha=0.3)

    def norm(self):
        return torch.stack([p.grad.norm() for p in self.layers.parameters() if p.grad is not None]).norm()

    def training_step(self, batch, batch_idx):
        far = torch.nn.functional.mse_loss(self(batch["x"]), self.average(batch["x"]))
        return self.loss(batch) + 0.1 * far

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.layers.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class AroundStep(Averaging):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        self.log("before", sum(p.detach().norm() for p in self.layers.parameters()))
        optimizer.step(closure=optimizer_closure)
        self.recorded.append(float(self.norm()))
        self.follow()


class AfterLightningsStep(Averaging):
    def optimizer_step(self, *args, **kwargs):
        super().optimizer_step(*args, **kwargs)
        self.follow()


class ManualClosure(Averaging):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        optimizer_closure()
        self.recorded.append(float(clip_grad_norm_(self.parameters(), 0.05)))
        optimizer.optimizer.step()
        self.follow()


class ZeroingGradients(Averaging):
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad()
        self.follow()


class SteppingScheduler(Averaging):
    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step()
        self.follow()


class TurningToEvaluation(Averaging):
    def on_validation_model_eval(self):
        self.follow()
        super().on_validation_model_eval()

    def validation_step(self, batch, batch_idx):
        self.log("val", torch.nn.functional.mse_loss(self.average(batch["x"]), batch["y"]))


class Backward(Averaging):
    def backward(self, loss, *args, **kwargs):
        super().backward(loss, *args, **kwargs)
        self.recorded.append(float(clip_grad_norm_(self.layers.parameters(), 0.05)))


class SteppingTwice(Averaging):
    """Steps again with the same gradients, halved."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        for p in self.layers.parameters():
            p.grad.mul_(0.5)
        self.recorded += [float(self.norm()), self.total()]
        self.optimizers().optimizer.step()
        self.recorded.append(self.total())
        self.optimizers().step()
        self.recorded.append(self.total())

    def total(self):
        return float(sum(p.detach().square().sum() for p in self.layers.parameters()))


CASES = (
    AroundStep,
    AfterLightningsStep,
    ManualClosure,
    ZeroingGradients,
    SteppingScheduler,
    TurningToEvaluation,
    Backward,
    SteppingTwice,
)


def run_fit(size, pp, case, zero, accumulate, tp=1):
    ignore_warnings()
    model = case()
    hooks = set(vars(case)) - {"validation_step"}
    strategy = {"num_microbatches": 2, "zero_stage": zero, "tensor_parallel_size": tp} if size > 1 else {}
    trainer = trainer_of(size, pp, strategy_options=strategy, max_epochs=2, accumulate_grad_batches=accumulate)
    each = 4 * pp * tp // size if size > 1 else 4
    val = [loader(each, 8)] if case is TurningToEvaluation else None
    trainer.fit(model, loader(each, 16, replicas=1 if size == pp * tp else None), val)
    assert not hooks & set(vars(model))
    assert "step" not in vars(trainer.strategy) and "optimizer_step" not in vars(trainer.strategy)
    return weights_of(model), {name: float(value) for name, value in trainer.callback_metrics.items()}, model.recorded


references = {}


def assert_parity(worlds, size, pp, case, *, zero=0, accumulate=1, tp=1):
    key = case, accumulate
    if key not in references:
        [references[key]] = worlds.run(1, run_fit, 1, 1, case, 0, accumulate)
    weights, logged, recorded = references[key]
    for rank in worlds.run(size, run_fit, size, pp, case, zero, accumulate, tp):
        assert_same(rank[0], weights)
        assert_same(rank[1], logged)
        assert rank[2] == pytest.approx(recorded, rel=1e-10, abs=1e-12)


@each_under_sizes("case", CASES, {"pp2": (2, 2), "dp2xpp2": (4, 2)})
def test_overridden_hooks_see_the_full_model(worlds, size, pp, case):
    assert_parity(worlds, size, pp, case)


@pytest.mark.parametrize("case", [AroundStep, Backward, SteppingTwice])
def test_sharded_replicas_see_the_full_model(worlds, case):
    assert_parity(worlds, 2, 1, case, zero=3)


@pytest.mark.parametrize("case", [pytest.param(AroundStep, marks=pytest.mark.slow), SteppingTwice])
def test_tensor_ranks_see_the_full_model(worlds, case):
    assert_parity(worlds, 2, 1, case, tp=2)


@pytest.mark.parametrize("case", [AroundStep, Backward])
def test_overridden_hooks_see_accumulated_gradients(worlds, case):
    assert_parity(worlds, 2, 2, case, accumulate=2)
