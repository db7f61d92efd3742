"""Gradients that a manual step reads by itself, of experts that ranks share: they are full, as in one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from faults.layouts import FEATURES, Case, Regression, check
from torch import Tensor, nn

from models.expert_modules import BestOfFour
from models.regression import closure_of


class ReadsGradients(Regression):
    """Reads the norm of each gradient, clears one of them, and clips the rest by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layers = nn.ModuleList(BestOfFour(FEATURES) for _ in range(2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        self.zero_grad()
        self.see()
        self.manual_backward(loss)
        self.see()
        self.change(batch_idx)
        self.see()
        optimizer.step()
        optimizer.zero_grad(set_to_none=bool(batch_idx % 2))
        self.see()
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return None

    def see(self) -> None:
        self.seen.append([-1.0 if p.grad is None else float(p.grad.norm()) for p in self.parameters()])

    def change(self, batch_idx: int) -> None:
        self.seen.append(float(nn.utils.clip_grad_norm_(self.parameters(), 0.05)))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)


class WritesGradients(ReadsGradients):
    """In each batch by another line."""

    def change(self, batch_idx: int) -> None:
        for p in self.parameters():
            if p.grad is None:
                continue
            if batch_idx == 0:
                p.grad = p.grad / (1 + p.grad.norm())
            elif batch_idx == 1:
                p.grad.data.clamp_(-0.01, 0.01)
            elif batch_idx == 2:
                p.grad *= 0.5
            else:
                gradient = p.grad.clone()
                del p.grad
                assert p.grad is None
                p.grad = gradient
                gradient.mul_(2)


class ClipsInClosure(ReadsGradients):
    """A hook reads what the closure has clipped."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.optimizers().step(closure_of(self, batch, partial(self.change, batch_idx)))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.see()


class ReadsAlone(ReadsGradients):
    """One rank reads what the others do not."""

    def see(self) -> None:
        if self.global_rank == 1:
            super().see()


def case(module: Any, **options: Any) -> Case:
    return Case(module, saves=True, strategy={"expert_parallel_size": 2, **options})


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("module", "layout", "options"),
    [
        pytest.param(ReadsGradients, "dp4", {}, id="reads"),
        pytest.param(ReadsGradients, "dp2", {}, id="reads, one copy", marks=SLOW),
        pytest.param(ReadsGradients, "tp2 x dp2", {}, id="reads, tensor ranks", marks=SLOW),
        pytest.param(ReadsGradients, "dp4", {"zero_stage": 2}, id="reads, zero2", marks=SLOW),
        pytest.param(WritesGradients, "dp2", {}, id="writes"),
        pytest.param(WritesGradients, "dp4", {"zero_stage": 3}, id="writes, zero3", marks=SLOW),
        pytest.param(ClipsInClosure, "dp2", {}, id="closure"),
    ],
)
def test_equal_one_process(worlds, tmp_path, module, layout, options):
    check(worlds, case(module, **options), layout, tmp_path)


def test_read_on_one_rank_is_refused(worlds, tmp_path):
    refused = {"dp2": "reads the gradient of 'layers.0.experts.0.0.weight'"}
    check(worlds, Case(ReadsAlone, strategy={"expert_parallel_size": 2}, refused=refused), "dp2", tmp_path)
