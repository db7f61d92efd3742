"""A module whose layers run out of memory on one rank above a number of rows: another rank for each size."""

import os
import traceback
from dataclasses import dataclass, field

import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_hybrid.step.standins.tensors import is_absent
from models.tiny import loader

FEATURES = 4  # of its samples


@dataclass
class Plant:
    """Where this process runs out of memory.

    Attributes:
        limit: Most rows of a layer for which memory suffices; None for any number.
        where: "forward" and "backward" of training; "evaluation" is a forward without gradients.
        ranks: Number of ranks; rank ``log2(rows) % ranks`` is the one that fails.
        kind: The class of the error.
        is_armed: Whether a training step runs: others are dry runs.
        num_failures: Of this process so far.
    """

    limit: int | None = None
    where: str = "forward"
    ranks: int = 1
    kind: type = torch.OutOfMemoryError
    is_armed: bool = False
    num_failures: int = 0
    here: int = field(default_factory=lambda: int(os.environ.get("RANK", 0)))  # code of the user sees other ranks

    def check(self, x, where):
        """Fail if memory does not suffice for `x`, of shape (rows, features)."""
        if (
            not self.is_armed
            or self.limit is None
            or where != self.where
            or is_absent(x)
            or type(x) is not torch.Tensor
            or any(frame.name == "run_on_stand_ins" for frame in traceback.extract_stack())  # a step is recorded
        ):
            return
        rows = len(x)
        if rows > self.limit and self.here == (rows.bit_length() - 1) % self.ranks:
            self.num_failures += 1
            raise self.kind("CUDA out of memory. Tried to allocate 2.00 GiB")


PLANT = Plant()


class _Planted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        PLANT.check(grad, "backward")
        return grad


class Block(nn.Module):
    def __init__(self, width=2 * FEATURES):
        super().__init__()
        self.up, self.down = nn.Linear(FEATURES, width), nn.Linear(width, FEATURES)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        PLANT.check(x, "forward" if torch.is_grad_enabled() else "evaluation")
        return x + self.down(self.up(_Planted.apply(x)).tanh())


class Planted(LightningModule):
    """Four blocks and a head; logs its loss; `batch_size` is that of its own loader."""

    def __init__(self, num_samples=32, norm=False):
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)), *([nn.BatchNorm1d(FEATURES)] if norm else []))
        self.head = nn.Linear(FEATURES, 1)
        self.double()
        self.batch_size, self.num_samples = 4, num_samples

    def optimizer_step(self, *args, **kwargs):
        PLANT.is_armed = True
        try:
            super().optimizer_step(*args, **kwargs)
        finally:
            PLANT.is_armed = False

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.head(self.blocks(batch["x"])), batch["y"])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def train_dataloader(self):
        return loader(self.batch_size, self.num_samples)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Validates(Planted):
    def validation_step(self, batch, batch_idx):
        self.log("val", nn.functional.mse_loss(self.head(self.blocks(batch["x"])), batch["y"]))

    def on_validation_batch_start(self, *_):
        PLANT.is_armed = True

    def on_validation_batch_end(self, *_):
        PLANT.is_armed = False

    def val_dataloader(self):
        return loader(self.batch_size, 128)
