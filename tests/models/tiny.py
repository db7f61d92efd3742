"""A tiny LightningModule with its data."""

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

FEATURES = 4


class Samples(Dataset):
    """Sample i is a function of i."""

    def __init__(self, num=16):
        self.num = num

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        x = torch.cos(torch.arange(FEATURES, dtype=torch.float64) * (index + 1) + index)
        return {"x": x, "y": x.sum().reshape(1) / 2, "index": index}


class Tiny(LightningModule):
    """Four layers, a mean squared error, plain SGD."""

    def __init__(self, layers=4):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh()) for _ in range(layers)), nn.Linear(FEATURES, 1)
        ).double()

    def forward(self, x):
        return self.layers(x)

    def loss(self, batch):
        return nn.functional.mse_loss(self(batch["x"]), batch["y"])

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader(batch_size, num=16, *, replicas=None, **options):
    """A loader in order; with `replicas`, in the order of Lightning's shuffled shards for that many ranks."""
    samples = Samples(num)
    if replicas is not None:
        options["sampler"] = DistributedSampler(samples, num_replicas=1, rank=0, shuffle=True, seed=0)
    return DataLoader(samples, batch_size=batch_size, **options)
