"""A training step of automatic optimization that reads gradients before Lightning clears them."""

from __future__ import annotations

from typing import Any

import pytest
from faults.layouts import Case, Regression, check
from lightning.pytorch.utilities import grad_norm
from torch import Tensor


class Weighs(Regression):
    """The loss by the norms of the step before."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        return self.loss(batch) * (1 + sum(norms))


class LogsNorm(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log_dict(grad_norm(self, 2))
        return loss


class SeesNone(Regression):
    """In the first step, whatever microbatches have run, and of a frozen parameter; in a hook those of the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.head.bias.requires_grad_(False)
        self.layers[0][0].weight.register_hook(self.read)

    def read(self, gradient: Tensor) -> None:
        assert self.head.bias.grad is None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        read = self.parameters() if self.trainer.global_step == 0 else [self.head.bias]
        assert all(p.grad is None for p in read)
        return self.loss(batch)


LAYOUTS = ("one device", "tp2", "zero1", "zero3 layerwise", "pp2")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("module", [Weighs, LogsNorm])
def test_refused(worlds, tmp_path, module, layout):
    refused = "training_step reads a gradient of the step before"
    check(worlds, Case(module, refused={layout: refused}), layout, tmp_path)


@pytest.mark.parametrize("layout", ["one device", pytest.param("zero1", marks=pytest.mark.slow)])
def test_no_gradient_is_none(worlds, tmp_path, layout):
    check(worlds, Case(SeesNone), layout, tmp_path)


def test_replicas_alone_read_them(worlds, tmp_path):
    check(worlds, Case(Weighs), "dp2", tmp_path)
