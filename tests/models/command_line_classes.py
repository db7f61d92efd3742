"""Classes that tests name on the command line."""

import torch
from torch.utils.data import DataLoader

from models.cases import Samples
from models.hand_written import Layers
from models.mixtures import Looped


class Stack(Layers):
    """Its loader is its own, and so is each argument."""

    def __init__(self, num_layers: int = 4, flag: bool = True, name: str | None = "a"):
        super().__init__(num_layers)
        self.flag, self.name = flag, name

    def train_dataloader(self):
        return DataLoader(Samples(self.kind, 32, torch.float32), batch_size=8)

    val_dataloader = train_dataloader


class Mixture(Looped):
    def train_dataloader(self):
        return DataLoader(Samples(self.kind, 32, torch.float32), batch_size=8)

    val_dataloader = train_dataloader


class Manual(Stack):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class BrokenStep(Stack):
    def training_step(self, batch, batch_idx=0):
        raise KeyError("no such column")


class BrokenConstructor(Stack):
    def __init__(self):
        raise ValueError("the user's own")
