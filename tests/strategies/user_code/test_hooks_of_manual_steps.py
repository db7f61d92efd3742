"""Hooks on steps of optimizers that a manual step calls, and steps of the user's own, see what one process shows."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from faults.layouts import Case, check
from params.reads.test_gradients_in_steps import Manual, Routed, perceptron
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

SLOW = pytest.mark.slow


class Hooked(Manual):
    """Torch's optimizer, with hooks that read parameters, gradients and states, and change them.

    Experts that ranks share may be read by hooks with which the optimizer is built alone.
    """

    def __init__(self, registers: str, layer: Any) -> None:
        super().__init__(layer)
        self.registers, self.handles = registers, []

    def register(self, optimizer: Any) -> None:
        optimizer.register_step_pre_hook(self.before)
        optimizer.register_step_post_hook(self.after)

    def readable(self) -> list[Tensor]:
        return [p for name, p in self.named_parameters() if self.registers == "when built" or "experts" not in name]

    def look(self, optimizer: Any) -> None:
        self.seen.append([[list(p.shape), float(p.norm())] for p in self.readable()])
        for p in self.parameters():
            if p.grad is not None:
                self.seen.append([list(p.grad.shape), float(p.grad.norm())])
            if state := optimizer.state.get(p):
                self.seen.append([list(state["exp_avg"].shape), float(state["exp_avg"].norm())])

    @torch.no_grad()
    def before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.look(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        total = torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            p.grad.mul_(0.1 / total)

    @torch.no_grad()
    def after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.look(optimizer)
        total = sum(p.square().sum() for p in self.readable()).sqrt()
        for p in self.readable():
            p.mul_(2.0 / total)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)
        if self.registers == "when built":
            self.register(optimizer)
        return optimizer

    def on_train_start(self) -> None:
        if self.registers == "on_train_start":
            self.register(self.trainer.optimizers[0])
        if self.registers == "on all optimizers":
            self.handles = [
                register_optimizer_step_pre_hook(self.before),
                register_optimizer_step_post_hook(self.after),
            ]

    def on_train_end(self) -> None:
        for handle in self.handles:
            handle.remove()

    def change(self, batch: Any, batch_idx: int) -> None:
        if self.registers == "in the step" and batch_idx == 1:
            self.register(self.optimizers().optimizer)


class Sharp(torch.optim.AdamW):
    """Reads and writes around the step of its base."""

    def __init__(self, *args: Any, seen: list[Any], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen = seen

    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        with torch.no_grad():
            for p in parameters:
                self.seen.append([float(p.norm()), float(p.grad.norm())])
                p.grad.sub_(p.grad.mean())
                if state := self.state.get(p):
                    self.seen.append([list(state["exp_avg"].shape), float(state["exp_avg"].norm())])
        loss = super().step(closure)
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        with torch.no_grad():
            norm = torch.stack([p.norm() for p in parameters]).norm()
            for p in parameters:
                p.mul_(2.0 / norm)
        return loss


class OwnStep(Manual):
    def configure_optimizers(self) -> Any:
        return Sharp(self.parameters(), lr=1e-2, eps=1e-4, seen=self.seen)


class OwnStepWithClosure(OwnStep):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            self.see()
            self.seen.append([float(p.norm()) for name, p in self.named_parameters() if "experts" not in name])
            return loss

        optimizer.step(closure)
        self.see()


WHEN = ("when built", "on_train_start", "in the step", "on all optimizers")
CASES = {
    **{f"hooks {when}": partial(Hooked, when) for when in WHEN},
    "own step": OwnStep,
    "own step, closure": OwnStepWithClosure,
}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tp2": ("tp2", {}),
    "zero1": ("zero1", {}),
    "zero2": ("zero2", {}),
    "zero3": ("zero3", {}),
    "zero3 layerwise": ("zero3 layerwise", {}),
    "zero1 x tp2": ("tp2 x dp2", {"zero_stage": 1}),
    "pp2": ("pp2", {}),
    "ep2": ("dp2", {"expert_parallel_size": 2}),
    "ep2 x zero1": ("dp2", {"expert_parallel_size": 2, "zero_stage": 1}),
    "ep2 x zero3 x dp4": ("dp4", {"expert_parallel_size": 2, "zero_stage": 3}),
    "ep2 x tp2": ("tp2 x dp2", {"expert_parallel_size": 2}),
}


KEPT = {
    ("hooks on_train_start", "tp2"), ("hooks on_train_start", "zero3"), ("hooks in the step", "zero1"),
    ("hooks in the step", "ep2 x zero1"), ("own step, closure", "zero1 x tp2"), ("hooks when built", "ep2"),
    ("hooks on all optimizers", "zero1 x tp2"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        pytest.param(case, layout, marks=[SLOW] * ((case, layout) not in KEPT), id=f"{case}-{layout}")
        for case in CASES
        for layout in LAYOUTS
    ],
)
def test_equals_one_process(worlds: Any, tmp_path: Any, case: str, layout: str) -> None:
    ranks, options = LAYOUTS[layout]
    layer = Routed if layout.startswith("ep2") else perceptron
    check(worlds, Case(partial(CASES[case], layer), strategy=options), ranks, tmp_path)
