"""Modules with MoE layers of this package."""

from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from lightning_hybrid.experts import MoE
from models.hand_written import WIDTH, Lit


class Experts(Lit):
    """Residual MoE layers; each adds its own losses to the step's."""

    options: ClassVar[dict[str, Any]] = {}

    def __init__(self):
        super().__init__()
        options = {"num_experts": 4, "balance_loss": 0.1, "z_loss": 0.01, **self.options}
        self.layers = nn.ModuleList(MoE(WIDTH, 24, **options) for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def loss(self, batch):
        x, reports = batch["x"], []
        for layer in self.layers:
            y, report = layer(x)
            x = x + y
            reports.append(report)
        self.log("load", torch.stack([report.load.max() for report in reports]).max())
        return F.mse_loss(self.head(x), batch["y"]) + sum(report.loss for report in reports)


class Balanced(Experts):
    """Without router losses, which are means over each batch: those of replicas differ from one process."""

    options: ClassVar = {"balance_loss": 0.0, "shared_experts": 1}
