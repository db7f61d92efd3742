"""Classes that commands cannot run: without data, with data that fails, for other devices."""

import lightning.pytorch as pl
import torch
from torch import nn

from models.command_line_classes import Stack, make_loader
from models.hand_written import Layers


class NoLoader(pl.LightningModule):
    """It has a training step alone."""

    def __init__(self):
        super().__init__()
        self.inner = Layers(2)

    def training_step(self, batch, batch_idx):
        return self.inner.loss(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class FailingLoader(NoLoader):
    def train_dataloader(self):
        return open("no/such/file")


class LoaderOfDataModule(NoLoader):
    def train_dataloader(self):
        return self.trainer.datamodule.train_dataloader()


class LoaderIsNone(NoLoader):
    def train_dataloader(self):
        return None


class EmptyLoader(NoLoader):
    def train_dataloader(self):
        return []


class OtherBatch(Stack):
    def training_step(self, batch, batch_idx=0):
        return self.head(batch.no_such_field).mean()


class OnCuda(Stack):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(1, device="cuda"))


class NoStep(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def train_dataloader(self):
        return make_loader()


class NoLightning(nn.Module):
    """A module of torch."""


class NeedsArguments(Stack):
    def __init__(self, width: int, depth: int):
        super().__init__()


class SteppingBatches(Stack):
    """Its scheduler needs the number of steps of the run."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        steps = self.trainer.estimated_stepping_batches
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)]


class BuiltLater(Stack):
    """Its layers are made by ``configure_model``."""

    def __init__(self):
        super().__init__()
        self.head = None

    def configure_model(self):
        if self.head is None:
            self.head = Layers(1).head


class NoTrainingData(pl.LightningDataModule):
    """It has no hook."""


class Prepares(pl.LightningDataModule):
    def prepare_data(self):
        self.is_prepared = True

    def train_dataloader(self):
        assert self.is_prepared
        return make_loader()


class CannotPrepare(Prepares):
    def prepare_data(self):
        raise FileNotFoundError("no archive")


class NeedsFolder(Prepares):
    def __init__(self, folder: str):
        super().__init__()
