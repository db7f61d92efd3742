"""Evaluation steps that write results into their batch and return it: hooks see them there."""

import dataclasses

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from harness.trainer_runs import trainer_of

FEATURES = 4


@dataclasses.dataclass
class Images:
    x: torch.Tensor
    y: torch.Tensor
    found: torch.Tensor | None = None


def as_dict(rows):
    return {"x": torch.stack([row[0] for row in rows]), "y": torch.stack([row[1] for row in rows])}


def as_images(rows):
    return Images(**as_dict(rows))


class Finds(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(*(nn.Linear(FEATURES, FEATURES) for _ in range(4)))
        self.head = nn.Linear(FEATURES, 1)

    def training_step(self, batch, batch_idx):
        batch = vars(batch) if isinstance(batch, Images) else batch
        return F.mse_loss(self.head(self.body(batch["x"])), batch["y"])

    def validation_step(self, batch, batch_idx):
        fields = vars(batch) if isinstance(batch, Images) else batch
        fields["found"] = self.head(self.body(fields["x"]))
        return batch

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Reads(Callback):
    def __init__(self):
        self.seen = []

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        assert outputs is batch
        self.seen.append(vars(batch)["found"] if isinstance(batch, Images) else batch["found"])


def found(collate, options):
    torch.manual_seed(1)
    given, reads = dict(options), Reads()
    stages = given.pop("pipeline_parallel_size", 1)
    trainer = trainer_of(2 if options else 1, stages, strategy_options=given, max_epochs=1, callbacks=[reads])
    data = TensorDataset(torch.randn(16, FEATURES), torch.randn(16, 1))
    trainer.fit(Finds(), *(DataLoader(data, 8, collate_fn=collate) for _ in range(2)))
    return reads.seen


@pytest.mark.parametrize("collate", [as_dict, as_images])
@pytest.mark.parametrize(
    "options",
    [
        {"pipeline_parallel_size": 2, "num_microbatches": 1},
        {"pipeline_parallel_size": 2, "num_microbatches": 4},
        {"tensor_parallel_size": 2},
    ],
    ids=str,
)
def test_returned_batch_contains_what_the_step_wrote(worlds, collate, options):
    [expected] = worlds.run(1, found, collate, {})
    for seen in worlds.run(2, found, collate, options):
        torch.testing.assert_close(seen, expected, rtol=1e-5, atol=1e-6)
