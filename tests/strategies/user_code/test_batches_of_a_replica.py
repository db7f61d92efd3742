"""Ranks of a replica that have different batches are an error, whatever they share the batch for."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, Dataset

from harness.trainer_runs import ignore_warnings, trainer_of
from lightning_hybrid.errors import RanksDisagree
from models.tensor_blocks import WIDTH, Block, FusedAttention

LENGTH, BATCH = 4, 4


class Drawn(Dataset):
    """Samples after the first ones differ on some ranks."""

    def __init__(self, equal, seed):
        general = torch.Generator().manual_seed(0)
        own = torch.Generator().manual_seed(seed)
        first = torch.randn(equal, LENGTH, WIDTH, generator=general)
        self.samples = torch.cat([first, torch.randn(8 - equal, LENGTH, WIDTH, generator=own)])

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


class Blocks(LightningModule):
    manual = False

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = not self.manual
        self.blocks = nn.Sequential(*(Block(FusedAttention()) for _ in range(2)))

    def training_step(self, batch, batch_idx):
        loss = self.blocks(batch).square().mean()
        if self.manual:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def validation_step(self, batch, batch_idx):
        self.blocks(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ByHand(Blocks):
    manual = True


class Branches(Blocks):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if loss.item() < 1e9 else None


class BranchesByHand(Branches):
    manual = True


class Images(Blocks):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(
            nn.Unflatten(1, (1, LENGTH)), nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 3, padding=1)
        )


def error_of(case, layout, differing, equal, stage="fit"):
    """The error of this rank, where `differing` ranks have other samples than the rest after `equal` ones."""
    ignore_warnings()
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    drawn = DataLoader(Drawn(equal, int(rank in differing)), BATCH)
    trainer = trainer_of(size, strategy_options={"num_microbatches": 1, **layout}, use_distributed_sampler=False)
    try:
        if stage == "fit":
            trainer.fit(case(), drawn)
        elif stage == "validation":
            trainer.fit(case(), DataLoader(Drawn(8, 0), BATCH), drawn)
        else:
            getattr(trainer, stage)(case(), drawn)
    except Exception as error:
        return type(error), str(error)
    return None, "nothing was raised"


TP, CP = {"tensor_parallel_size": 2}, {"context_parallel_size": 2}
PP, SP = {"pipeline_parallel_size": 2}, {"spatial_parallel_size": 2}


def check(worlds, size, *args):
    for kind, message in worlds.run(size, error_of, *args):
        assert kind is RanksDisagree, message
        assert "the batch differs between the ranks of one replica" in message


@pytest.mark.parametrize("equal", [0, BATCH], ids=["first", "later"])
@pytest.mark.parametrize(
    ("case", "layout"),
    [(Blocks, TP), (ByHand, TP), (Blocks, CP), (Images, SP), (ByHand, PP), (Branches, PP), (BranchesByHand, PP)],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value.__name__,
)
def test_a_batch_that_differs_is_refused(worlds, case, layout, equal):
    check(worlds, 2, case, layout, [1], equal)


@pytest.mark.parametrize("layout", [TP, CP, PP], ids="-".join)
@pytest.mark.parametrize("stage", ["validation", "validate"])
def test_an_evaluated_batch_that_differs_is_refused(worlds, layout, stage):
    check(worlds, 2, Blocks, layout, [1], BATCH, stage)


def test_a_batch_that_differs_beside_stages_is_refused(worlds):
    check(worlds, 4, Blocks, TP | PP, [1, 3], BATCH)


def test_replicas_have_their_own_batches(worlds):
    for kind, _ in worlds.run(4, error_of, Blocks, TP, [2, 3], 0):
        assert kind is None
