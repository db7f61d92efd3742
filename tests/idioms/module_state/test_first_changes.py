"""What steps store on modules only in later batches, or in place: as in one process, under stages and microbatches."""

import warnings

import numpy
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from harness.trainer_runs import trainer_of

WORDS = 7
LAYOUTS = [
    {"num_microbatches": 2},
    {"pipeline_parallel_size": 2, "num_microbatches": 2},
    {"pipeline_parallel_size": 2, "num_microbatches": 4},
]


class Counts(LightningModule):
    """The first batches have no word 0."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.words = nn.Embedding(WORDS, 8).double()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, WORDS)).double()
        self.kept, self.array, self.tensor, self.found = {"errors": 0, "all": 0}, numpy.zeros(WORDS), None, []
        self.tensor = torch.zeros(WORDS)

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.body(self.words(batch[0])), batch[1])
        self.store(batch[0], "train")
        return loss

    def validation_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.body(self.words(batch[0])), batch[1])
        self.store(batch[0], "val")
        self.log("loss", loss, batch_size=1)
        self.log("weighted", loss, batch_size=int((batch[0] > 2).sum()) + 1)

    def on_train_batch_end(self, *_):
        self.found.append([float(self.kept["errors"]), self.array.tolist(), self.tensor.tolist()])

    def on_validation_batch_end(self, *_):
        self.on_train_batch_end()

    def on_validation_epoch_end(self):
        self.found.append([float(value) for value in self.trainer.callback_metrics.values()])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Sum(Counts):
    def store(self, x, mode):
        self.kept["errors"] += int((x == 0).sum()) if mode == "val" else 0


class Largest(Counts):
    def store(self, x, mode):
        self.kept["errors"] = max(self.kept["errors"], int((x == 0).sum())) if mode == "val" else 0


class Latest(Counts):
    def store(self, x, mode):
        if mode == "val" and (count := int((x == 0).sum())):
            self.kept["errors"] = count
            self.log("errors", float(count), reduce_fx="max")


class Histogram(Counts):
    def store(self, x, mode):
        self.array += numpy.bincount(x.flatten().numpy(), minlength=WORDS)
        self.tensor += torch.bincount(x.flatten(), minlength=WORDS)


class LateHistogram(Counts):
    def store(self, x, mode):
        if mode == "val" and bool((x == 0).any()):
            self.array += numpy.bincount(x.flatten().numpy(), minlength=WORDS)
            self.tensor[: x.shape[0] - 1] += 1


def trained(kinds, world=1, options=None):
    warnings.simplefilter("ignore")
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randint(0, WORDS, (28,), generator=generator) for _ in range(2))
    x[:8] = x[:8].clamp(min=1)
    found = {}
    for kind in kinds:
        given = dict(options or {})
        trainer = trainer_of(world, given.pop("pipeline_parallel_size", 1), max_epochs=2, strategy_options=given)
        loader, module = DataLoader(TensorDataset(x, y), 8), kind()
        trainer.fit(module, loader, loader)
        found[kind.__name__] = module.found
    return found


@pytest.mark.parametrize("options", LAYOUTS, ids=str)
def test_stored_as_in_one_process(worlds, options):
    kinds = [Sum, Largest, Latest, Histogram, LateHistogram]
    expected, world = trained(kinds), len(options)
    for found in worlds.run(world, trained, kinds, world, options):
        for name, steps in expected.items():
            for step, wanted in zip(found[name], steps, strict=True):
                torch.testing.assert_close(step, wanted, rtol=1e-6, atol=1e-9, msg=f"{name}: {step} for {wanted}")
