"""Manual optimization of experts that ranks share, whose states ZeRO shards over other ranks than those of the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from faults.layouts import FEATURES, Case, Regression, check
from torch import Tensor, nn

from models.expert_modules import BestOfFour


class TwoOptimizers(Regression):
    """One steps in each batch, with experts of the first layer; the other one in every second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layers = nn.ModuleList(BestOfFour(FEATURES) for _ in range(2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        each, every_second = self.optimizers()
        loss = self.loss(batch)
        self.manual_backward(loss)
        self.clip_gradients(each, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        each.step()
        each.zero_grad()
        if batch_idx % 2:
            every_second.step()
            every_second.zero_grad()
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return None

    def configure_optimizers(self) -> Any:
        first = [*self.layers[0].parameters(), *self.head.parameters()]
        return torch.optim.AdamW(first, lr=1e-2, eps=1e-4), torch.optim.SGD(self.layers[1].parameters(), 0.1, 0.9)


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_equals_one_process(worlds, tmp_path, stage):
    case = Case(TwoOptimizers, saves=True, strategy={"expert_parallel_size": 2, "zero_stage": stage})
    check(worlds, case, "dp4", tmp_path)
