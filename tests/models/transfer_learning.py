"""A backbone and a head, as in examples of transfer learning."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule
from torch import nn

from models.tiny import FEATURES


class Net(LightningModule):
    """A backbone and a head, as examples of transfer learning have them; momentum, logs in every step."""

    def __init__(self, lr=0.05, norm=False):
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(3)
        self.backbone = nn.Sequential(
            *(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh()) for _ in range(3)),
            *([nn.BatchNorm1d(FEATURES)] if norm else []),
        ).double()
        self.head = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, 1)).double()
        self.lr = lr

    def forward(self, x):
        return self.head(self.backbone(x))

    def loss(self, batch):
        return nn.functional.mse_loss(self(batch["x"]), batch["y"])

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch), batch_size=len(batch["x"]))

    def test_step(self, batch, batch_idx):
        self.log("test", self.loss(batch), batch_size=len(batch["x"]))

    def predict_step(self, batch, batch_idx):
        return self(batch["x"])

    def configure_optimizers(self):
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=self.lr, momentum=0.9)
