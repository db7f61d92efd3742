"""Gradients that the closure of a manual step clips by hand are what the optimizer steps, shards too."""

from __future__ import annotations

from typing import Any

import torch
from faults.layouts import Case, check, each
from faults.parameter_cases import ByClosure


class Clipped(ByClosure):
    def change_gradients(self) -> None:
        self.seen.append(float(torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@each({"clipped": Case(Clipped, layouts=("tp2", "zero2", "tp2 x pp2"))}, {"clipped": ("tp2",)})
def test_equals_one_process(worlds, tmp_path, case, layout):
    check(worlds, case, layout, tmp_path)
