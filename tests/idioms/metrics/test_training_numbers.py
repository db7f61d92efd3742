"""Numbers that training steps log, under stages: sums over samples, and what only looks like one."""

import warnings

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from harness.trainer_runs import trainer_of

CLASSES = 4


class Logs(LightningModule):
    """Logs functions of the output of a classifier, and of its two losses."""

    ignored = -100

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(
            nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES)
        ).double()
        self.weights = nn.Parameter(torch.tensor([0.3, -0.2]).double())
        self.found = []

    def training_step(self, batch):
        x, y = batch
        out = self.body(x)
        error, entropy = out.square().mean(), F.cross_entropy(out, y, ignore_index=self.ignored)
        both = torch.stack([error, entropy])
        loss = (both * self.weights.exp()).sum() + self.weights.sum()
        numbers = {
            "weighted losses": loss,
            "scaled losses": (both * 2).abs().sum(),
            "one loss, several factors": (error * torch.ones(2)).sum(),
            "means of classes": out.mean(0).sum(),
            "squares": out.square().sum(),
            "rows": out.abs().mean(1).sum(),
            "hits": (out.argmax(1) == y).double().sum(),
            "loop": torch.stack([row.square().sum() for row in out]).sum(),
            "scaled loop": (torch.stack([row.square().sum() for row in out]) * 2).sum(),
            "joined": torch.cat([out, out.exp()], 1).abs().sum(),
        }
        if self.ignored < 0:  # a warning tells of it otherwise
            numbers["largest loss"] = (both * self.weights.exp()).max()
        self.log_dict(numbers, on_step=True, on_epoch=True)
        return loss

    def on_train_batch_end(self, *_):
        self.found.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Ignores(Logs):
    """Its entropy is a mean over labels, of which microbatches have different numbers."""

    ignored = 1


def trained(module_class, world=1, options=None):
    warnings.simplefilter("ignore")
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(12, 4, generator=generator).double(), torch.randint(0, CLASSES, (12,), generator=generator)
    )
    given = dict(options or {})
    trainer = trainer_of(world, given.pop("pipeline_parallel_size", 1), max_epochs=1, strategy_options=given)
    module = module_class()
    trainer.fit(module, DataLoader(data, 4))
    return module.found


@pytest.mark.parametrize("module", [Logs, Ignores])
def test_logged_as_in_one_process(worlds, module):
    expected = trained(module)
    for found in worlds.run(2, trained, module, 2, {"pipeline_parallel_size": 2, "num_microbatches": 2}):
        for step, wanted in zip(found, expected, strict=True):
            assert step == pytest.approx(wanted, rel=1e-6)
