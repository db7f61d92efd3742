"""A loss that is NaN on one sample is logged as NaN, also where another microbatch or rank has finite numbers."""

import math
import warnings

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from harness.trainer_runs import trainer_of

LAYOUTS = [
    {"pipeline_parallel_size": 2, "num_microbatches": 2},
    {"tensor_parallel_size": 2, "num_microbatches": 2},
    {"zero_stage": 3, "num_microbatches": 2},
    {"data_parallel_size": 2},
]


class Diverges(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch):
        x, y = batch
        out = self.body(x)
        loss = F.mse_loss(out, y)
        self.log("loss", loss)
        self.log("number", loss.item())
        self.log("epoch", loss, on_step=False, on_epoch=True)
        self.log("largest", loss.detach(), on_step=False, on_epoch=True, reduce_fx="max")
        self.log("output", out.detach().max())
        return loss

    def validation_step(self, batch):
        self.log("val_loss", F.mse_loss(self.body(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fitted(options):
    warnings.simplefilter("ignore")
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    x[9, 1] = math.nan
    loader = DataLoader(TensorDataset(x, x[:, :1].nan_to_num()), 8)
    given = dict(options)
    stop = EarlyStopping("val_loss", check_finite=True, patience=9)
    trainer = trainer_of(
        2, given.pop("pipeline_parallel_size", 1), callbacks=[stop], max_epochs=3, strategy_options=given
    )
    trainer.fit(Diverges(), loader, loader)
    return trainer.current_epoch, {key: float(value) for key, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("options", LAYOUTS, ids=str)
def test_logged_as_in_one_process(worlds, options):
    for epoch, logged in worlds.run(2, fitted, options):
        assert epoch == 1, "EarlyStopping(check_finite=True) ends the run"
        assert sorted(logged) == ["epoch", "largest", "loss", "number", "output", "val_loss"]
        assert all(map(math.isnan, logged.values())), logged
