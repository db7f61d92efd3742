"""A regression on named samples, and its data."""

import dataclasses
from collections.abc import Callable

import torch
from torch.utils.data import DataLoader, Dataset

from harness.layouts import under
from harness.verification import COMBINED, LAYOUTS, TENSOR
from models.regression import FEATURES, EncoderDecoder

BY_LAYOUT = [*LAYOUTS[2:], COMBINED]
by_layout = under(BY_LAYOUT, slow=[TENSOR])
UNSPLIT_BATCHES = {"num_microbatches": None}  # the strategy chooses: one microbatch where a batch cannot be split


class Samples(Dataset):
    """Sample i is a function of i."""

    def __init__(self, num=24):
        self.num = num

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        x = torch.cos(torch.arange(1, FEATURES + 1, dtype=torch.float64) * (index + 1) + index)
        return x, (x.sum(0, keepdim=True) / 2).tanh(), f"images/{index:04d}.png"


def columns(samples):
    x, y, names = zip(*samples, strict=True)
    return torch.stack(x), torch.stack(y), names


class Regression(EncoderDecoder):
    """Each module below defines in `shared_step` how it uses its batches."""

    def shared_step(self, batch):
        raise NotImplementedError

    def training_step(self, batch, batch_idx):
        loss = self.shared_step(batch)
        self.log("train_loss", loss, on_epoch=True, batch_size=self.size_of(batch))
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.shared_step(batch), batch_size=self.size_of(batch))

    def size_of(self, batch):
        return None

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@dataclasses.dataclass(frozen=True)
class Loaders:
    """Makes the data of one collate function; other processes are sent it."""

    collate: Callable

    def __call__(self):
        train = DataLoader(Samples(), 8, shuffle=True, collate_fn=self.collate)
        return {"train_dataloaders": train, "val_dataloaders": DataLoader(Samples(14), 4, collate_fn=self.collate)}
