"""Numbers of lists of tensors of several lengths, whose batch size Lightning guesses: replicas count equally."""

import warnings

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader

from harness.trainer_runs import trainer_of


def samples():
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 7, (16,), generator=generator).tolist()
    return [torch.randn(length, 3, generator=generator).double() for length in lengths]


class Ragged(LightningModule):
    """Logs the mean over samples of losses of rows; replicas take every second sample."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        self.found = []

    def train_dataloader(self):
        rank, size = self.trainer.global_rank, self.trainer.world_size
        return DataLoader(samples()[rank::size], 4 // size, collate_fn=list)

    def training_step(self, batch, batch_idx):
        loss = torch.stack([self.body(x).square().mean() for x in batch]).mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("step", loss)
        return loss

    def on_train_batch_end(self, *_):
        names = ("loss_step", "step")
        self.found.append([float(self.trainer.callback_metrics[name]) for name in names])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(world=1):
    warnings.simplefilter("ignore")
    options = {"tensor_parallel_size": 1} if world > 1 else {}
    trainer = trainer_of(world, use_distributed_sampler=False, strategy_options=options)
    module = Ragged()
    trainer.fit(module)
    return module.found


def test_steps_of_one_process(worlds):
    expected = trained()
    for found in worlds.run(2, trained, 2):
        for step, wanted in zip(found, expected, strict=True):
            assert step == pytest.approx(wanted, rel=1e-6)
