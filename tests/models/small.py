"""A small module with BatchNorm, dropout and a scheduler."""

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader


class Small(LightningModule):
    """With BatchNorm, dropout and a scheduler; logs in steps and over epochs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))
        self.batch_size, self.lr = 2, 0.1
        self.seen = []

    def forward(self, x):
        return self.net(x)

    def loss(self, batch):
        return self(batch).square().mean()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train", loss, prog_bar=True)
        self.log("both", loss, on_step=True, on_epoch=True)
        self.seen.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch))

    def test_step(self, batch, batch_idx):
        self.log("test", self.loss(batch))

    def predict_step(self, batch, batch_idx):
        return self(batch)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    def _loader(self, seed, num):
        samples = torch.randn(num, 4, generator=torch.Generator().manual_seed(seed))
        return DataLoader(samples, batch_size=self.batch_size)

    def train_dataloader(self):
        return self._loader(3, 16)

    def val_dataloader(self):
        return self._loader(4, 8)

    test_dataloader = predict_dataloader = val_dataloader
