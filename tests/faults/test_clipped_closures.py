"""Gradients that the closure of a manual step clips by hand are what the optimizer steps, shards too."""

from __future__ import annotations

from typing import Any

import torch
from faults.layouts import Case, Regression, check, each
from torch import Tensor


class Clipped(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            self.seen.append(float(torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)))
            return loss

        optimizer.step(closure)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@each({"clipped": Case(Clipped, layouts=("tp2", "zero2", "tp2 x pp2"))}, {"clipped": ("tp2",)})
def test_equals_one_process(worlds, tmp_path, case, layout):
    check(worlds, case, layout, tmp_path)
