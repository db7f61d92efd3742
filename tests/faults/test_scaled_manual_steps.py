"""A loss scale with manual optimization: gradients are unscaled in what optimizers step, shards too."""

from __future__ import annotations

from typing import Any

import torch
from faults.layouts import Case, Regression, check, each
from torch import Tensor

from lightning_hybrid import HybridPrecision


class Scaled(Regression):
    """Two optimizers; the gradients of one are clipped, those of the other are not."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        of_layers, of_head = self.optimizers()
        loss = self.loss(batch)
        self.manual_backward(loss)
        self.clip_gradients(of_layers, gradient_clip_val=10.0, gradient_clip_algorithm="norm")
        for optimizer in (of_layers, of_head):
            optimizer.step()
            optimizer.zero_grad()
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return None

    def configure_optimizers(self) -> Any:
        layers = torch.optim.SGD(self.layers.parameters(), lr=0.1, momentum=0.9)
        return layers, torch.optim.SGD(self.head.parameters(), lr=0.1)


SCALER = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
PLUGIN = HybridPrecision("16-mixed", scaler=SCALER)
LAYOUTS = ("tp2", "zero1", "zero3", "pp2", "tp2 x pp2")


@each({"scaled": Case(Scaled, trainer={"plugins": [PLUGIN]}, layouts=LAYOUTS)}, {"scaled": ("tp2",)})
def test_equals_one_process(worlds, tmp_path, case, layout):
    check(worlds, case, layout, tmp_path)
