"""Backwards that begin in a hook: refused where they would reach parameters that ranks share, right elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from faults.layouts import LAYOUTS, Case, Regression, check, refusal
from torch import Tensor

SLOW = pytest.mark.slow


class Penalty(Regression):
    def penalty(self) -> Tensor:
        return 0.1 * sum(p.square().sum() for p in self.parameters())


class AfterBackward(Penalty):
    def on_after_backward(self) -> None:
        self.penalty().backward()


class BeforeStep(Penalty):
    """By the loss of another call, whose first layers alone have parameters that each rank holds in full."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self(torch.ones(2, self.head.in_features, dtype=torch.float64)).sum().backward()


class BatchEnd(Penalty):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        parameters = list(self.parameters())
        derivatives = torch.autograd.grad(self.penalty(), parameters)
        with torch.no_grad():
            torch._foreach_sub_(parameters, derivatives)


class InManualStep(Penalty):
    """The whole step in a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


@pytest.mark.parametrize(
    ("module", "layout"),
    [
        pytest.param(
            module, layout, marks=[SLOW] * ((module, layout) not in {(AfterBackward, "zero1"), (BatchEnd, "tp2")})
        )
        for module in (AfterBackward, BeforeStep, BatchEnd, InManualStep)
        for layout in ("tp2", "zero1", "zero3", "pp2")
    ],
)
def test_parameters_that_ranks_share_are_refused(worlds: Any, tmp_path: Any, module: Any, layout: str) -> None:
    texts = worlds.run(LAYOUTS[layout][0], refusal, Case(module), layout, tmp_path)
    assert any("GlobalReadError" in text and "add the term to the loss" in text for text in texts), texts


class Sensitivity(Regression):
    """The derivative by inputs, of a model that hooks read, and numbers computed from parameters with a graph."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        x = torch.linspace(-1, 1, self.head.in_features, dtype=torch.float64).repeat(2, 1).requires_grad_()
        (derivative,) = torch.autograd.grad(self(x).square().sum(), x)
        self.seen.append([float(derivative.norm()), float(self.head.weight.norm())])
        self.weights = (self.layers[0][0].weight + 1).detach()
        self.seen.append([float(self.weights.sum()), float((self.head.weight @ self.layers[1][0].weight).sum())])


@pytest.mark.parametrize("layout", ["tp2", *(pytest.param(one, marks=SLOW) for one in ("zero1", "zero3", "pp2"))])
def test_derivatives_by_inputs_are_those_of_one_process(worlds: Any, tmp_path: Any, layout: str) -> None:
    check(worlds, Case(Sensitivity), layout, tmp_path)
