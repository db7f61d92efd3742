"""Steps that cannot run in microbatches: they branch on their loss, contrast samples, or select rows."""

import torch
from torch import nn
from torch.nn import functional as F

from models.regression import FEATURES, Regressor, mlp


class Branching(Regressor):
    """Branches on a number that stages after the first do not have."""

    def __init__(self):
        super().__init__()
        self.body, self.head = mlp(), nn.Linear(FEATURES, 1)

    def forward(self, x):
        h = self.body(x)
        return self.head(h) if h.abs().mean().item() < 10 else self.head(2 * h)


class Contrasts(Branching):
    """Compares each sample with all others of its batch."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        h = self(x)
        loss = F.cross_entropy(h @ y.T, torch.arange(len(x)))
        self.log("train_loss", loss)
        return loss


class SomeRows(Branching):
    """A mean over the samples that a label selects, another number in each half of the batch."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self(x)[y > 0.2], y[y > 0.2])
        self.log("train_loss", loss)
        return loss
