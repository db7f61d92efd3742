"""Numbers that a training step returns, or appends to lists, without stages: those of the batch, as in one process."""

import warnings

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from harness.trainer_runs import trainer_of

LAYOUTS = [
    {"num_microbatches": 2},
    {"tensor_parallel_size": 2, "num_microbatches": 2},
]


class Leaves(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        self.kept, self.found = [], []

    def numbers(self, out, x, y, mask):
        hits, scores = out.argmax(1) == y, out.detach()
        return {
            "hits": hits.sum(),
            "float hits": hits.double().sum(),
            "tokens": mask.double().sum(),
            "int tokens": int(mask.sum()),
            "number of tokens": float(mask.sum()),
            "samples": len(x),
            "constant": 4,
            "accuracy": hits.double().mean(),
            "accuracy as a number": hits.double().mean().item(),
            "largest": {"of scores": scores.max(), "any": (scores > 0.3).any()},
            "both": (scores.min().item(), [scores.square().sum()]),
            "scores": scores,
        }

    def training_step(self, batch, batch_idx):
        x, y, mask = batch
        out = self.body(x)
        loss = F.cross_entropy(out, y)
        numbers = self.numbers(out, x, y, mask)
        self.kept.append(numbers)
        return {"loss": loss, **numbers}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.found.append([outputs, self.kept.pop()])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class LeavesDeviation(Leaves):
    def numbers(self, out, x, y, mask):
        return {"deviation": out.detach().std()}


class LeavesMatrix(Leaves):
    """It looks like rows of samples."""

    def numbers(self, out, x, y, mask):
        return {"matrix": torch.cdist(out.detach(), out.detach())}


class LeavesAboveMean(Leaves):
    """Halves of a batch have as many outputs above their means as the batch has above its own."""

    def numbers(self, out, x, y, mask):
        return {"above mean": (out[:, 0] > out[:, 0].mean()).sum()}


class AveragesTokens(Leaves):
    """Its loss weighs by another count than samples."""

    def training_step(self, batch, batch_idx):
        x, _, mask = batch
        errors = (self.body(x) - x[:, :3]).square() * mask
        loss = errors.sum() / mask.sum()
        return {"loss": loss, "number": loss.item(), "by samples": errors.detach().mean(), "sum": errors.sum().item()}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.found.append(outputs)


def trained(module_class, world=1, options=None):
    warnings.simplefilter("ignore")
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(24, 4, generator=generator).double(), torch.randint(0, 3, (24,), generator=generator)
    loader = DataLoader(TensorDataset(x, y, torch.rand(24, 3, generator=generator) < 0.5), 8)
    trainer, module = trainer_of(world, 1, max_epochs=1, strategy_options=dict(options or {})), module_class()
    trainer.fit(module, loader)
    return module.found, bool(options and trainer.strategy.run.runner.unsplit_step_names)


@pytest.mark.parametrize(
    "module, is_split",
    [(Leaves, True), (AveragesTokens, True), (LeavesDeviation, False), (LeavesMatrix, False), (LeavesAboveMean, False)],
)
@pytest.mark.parametrize("options", LAYOUTS, ids=str)
def test_left_as_in_one_process(worlds, options, module, is_split):
    expected, _ = trained(module)
    world = 1 if options == LAYOUTS[0] else 2
    for found, is_unsplit in worlds.run(world, trained, module, world, options):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
        assert is_unsplit is not is_split
