"""What the modules of these tests have in common: four small layers, a head, and the mean squared error."""

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F
from wild.suite import FEATURES, LAYOUTS

STAGES = LAYOUTS[0]
REPLICAS = LAYOUTS[1]
BOTH = LAYOUTS[2]


class Regression(LightningModule):
    """A plain module; each test changes one thing."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(FEATURES, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def loss(self, batch):
        x, y = batch
        return F.mse_loss(self(x), y)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Manual(Regression):
    """Optimizes by hand."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
