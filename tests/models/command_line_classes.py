"""Classes that tests name on the command line."""

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch.utils.data import DataLoader

from lightning_hybrid import Hybrid3DStrategy
from models.cases import Samples
from models.hand_written import Layers
from models.images import UNet, VolumeUNet, images
from models.mixtures import Looped


class Stack(Layers):
    """Its loader is its own, and so is each argument."""

    def __init__(self, num_layers: int = 4, flag: bool = True, name: str | None = "a"):
        super().__init__(num_layers)
        self.flag, self.name = flag, name

    def train_dataloader(self):
        return DataLoader(Samples(self.kind, 32, torch.float32), batch_size=8)

    val_dataloader = train_dataloader


class ReadsFirst(Stack):
    """All of its layers read a tensor of the first stage."""

    def forward(self, x):
        x = self.layers[0](x)
        gate = torch.sigmoid(x)
        for layer in self.layers[1:]:
            x = x + gate * layer(x)
        return self.head(x)


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


class CountsRanks(Stack):
    """Its loss depends on the number of processes."""

    def training_step(self, batch, batch_idx=0):
        return super().training_step(batch, batch_idx) * self.trainer.world_size


class ReadsParameters(Stack):
    """Scales its head by a value of it."""

    def __init__(self):
        super().__init__()
        self.scale = 1 / self.head.weight.abs().max().item()


class AveragesWeights(Stack):
    """Copies its weights before the first step."""

    def configure_callbacks(self):
        return WeightAveraging()


class ReadsParametersAtStart(Stack):
    def setup(self, stage):
        float(self.head.weight.sum())


class BrokenConstructor(Stack):
    def __init__(self):
        raise ValueError("the user's own")


class Data(pl.LightningDataModule):
    def __init__(self, batch_size: int = 8, options: dict[str, int | list[int]] | None = None):
        super().__init__()
        self.batch_size, self.options = batch_size, options

    def train_dataloader(self):
        return make_loader(self.batch_size)

    val_dataloader = train_dataloader


def make_loader(batch_size: int = 8):
    return DataLoader(Samples(Layers.kind, 32, torch.float32), batch_size=batch_size)


class OwnStrategy(Hybrid3DStrategy):
    pass


class Images(pl.LightningModule):
    """Two convolutions of images of 64 rows."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(8, 2, 3, padding=1)
        )

    def training_step(self, batch, batch_idx=0):
        return self.layers(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return DataLoader(torch.randn(8, 3, 64, 64), batch_size=4)


class Segmentation(UNet):
    """A U-Net of images of 128 x 96 pixels."""

    def train_dataloader(self):
        return images(128, 96, count=4, batch=2)["train_dataloaders"]

    val_dataloader = train_dataloader


class Volumes(VolumeUNet):
    """A U-Net of volumes of 24 x 40 x 24 voxels."""

    def train_dataloader(self):
        return images(24, 40, 24, count=4, batch=2, channels=2)["train_dataloaders"]

    val_dataloader = train_dataloader
