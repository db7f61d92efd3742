"""Gradients that a manual step reads by itself, of experts that ranks share: they are full, as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from faults.layouts import FEATURES, Case, Regression, check
from torch import Tensor, nn


class Routed(nn.Module):
    """The best of four experts for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(FEATURES, 4, bias=False)
        experts = (nn.Sequential(nn.Linear(FEATURES, 12), nn.Tanh(), nn.Linear(12, FEATURES)) for _ in range(4))
        self.experts = nn.ModuleList(experts)

    def forward(self, x: Tensor) -> Tensor:
        gate, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            mask = chosen == index
            out[mask] = expert(x[mask]) * gate[mask].unsqueeze(-1)
        return x + out


class ReadsGradients(Regression):
    """Reads the norm of each gradient, and clips them by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layers = nn.ModuleList(Routed() for _ in range(2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.seen.append([0.0 if p.grad is None else float(p.grad.norm()) for p in self.parameters()])
        self.change(batch_idx)
        optimizer.step()
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return None

    def change(self, batch_idx: int) -> None:
        self.seen.append(float(nn.utils.clip_grad_norm_(self.parameters(), 0.05)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1, 0.9)


@pytest.mark.parametrize("layout", ["dp2", "dp4"])
def test_equal_one_process(worlds, tmp_path, layout):
    check(worlds, Case(ReadsGradients, strategy={"expert_parallel_size": 2}), layout, tmp_path)
