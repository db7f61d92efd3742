"""Replicas whose batches need different layouts: none waits for another that runs something else."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, default_collate

from harness.verification import check
from lightning_hybrid.verify import Layout
from models.regression import FEATURES, Regressor, mlp

REPLICAS = Layout("dp2 x pp2", devices=4, strategy={"pipeline_parallel_size": 2})
ZERO = [
    Layout(f"dp2 x pp2, ZeRO-{stage}", devices=4, strategy={"pipeline_parallel_size": 2, "zero_stage": stage})
    for stage in (2, 3)
]
SHARDED = "sharded instead of"
SIZE = 4


class Samples(Dataset):
    """Pairs, and a mark on one of them."""

    def __init__(self, marked, num=64):
        self.num, self.marked = num, marked

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        x = torch.cos(torch.arange(1, FEATURES + 1, dtype=torch.float64) * index)
        return x, x.sum(0, keepdim=True).tanh(), float(index == self.marked)


def marked_data(marked):
    return {"train_dataloaders": DataLoader(Samples(marked), SIZE), "val_dataloaders": DataLoader(Samples(None), SIZE)}


class Branches(Regressor):
    """Decides by a value of the model where a sample is marked."""

    def __init__(self):
        super().__init__()
        self.body, self.head = mlp(), nn.Linear(FEATURES, 1)

    def shared_step(self, batch):
        x, y, marks = batch
        h = self.body(x)
        if bool((marks > 0).any()) and h.mean().item() < 10:
            h = 2 * h
        return F.mse_loss(self.head(h), y)


class Scaled(Branches):
    """Is complete when its hooks have run."""

    def on_train_start(self):
        self.scale = 0.5

    def shared_step(self, batch):
        loss = super().shared_step(batch)
        return loss * self.scale if self.training else loss


# The samples of one replica in one batch of the verification: batch and replica are keys.
SAMPLES = {(0, 0): 17, (0, 1): 46, (1, 0): 33, (1, 1): 2, (2, 1): 4, (3, 0): 48}
MARKED = {place: functools.partial(marked_data, sample) for place, sample in SAMPLES.items()}


CASES = [
    *((Branches, place, REPLICAS) for place in SAMPLES),
    *((Branches, place, layout) for place in ((0, 1), (1, 0), (2, 1)) for layout in ZERO),
    *((Scaled, place, REPLICAS) for place in ((0, 1), (1, 0), (1, 1))),
]


def named(value):
    return "batch {} of replica {}".format(*value) if isinstance(value, tuple) else None


@pytest.mark.parametrize(("module", "place", "layout"), CASES, ids=lambda v: named(v) or getattr(v, "name", None))
def test_one_replica_has_an_unrecordable_batch(worlds, module, place, layout):
    report = check(worlds, module, layout, make_data=MARKED[place], steps=5, num_microbatches=2)
    assert report.outcome == "same", str(report)
    if place[0] > 1:
        assert SHARDED in str(report), str(report)


# --- in shards -------------------------------------------------------------------------------------------------------


class Decides(Branches):
    """Decides by a value of the model always, so that no pipeline runs it."""

    def shared_step(self, batch):
        x, y, _ = batch
        h = self.body(x)
        return F.mse_loss(self.head(h if h.mean().item() < 10 else 2 * h), y)


class Writes(Decides):
    """Writes a buffer for a marked sample, which is a first for one replica."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def shared_step(self, batch):
        if self.training and bool((batch[2] > 0).any()):
            self.seen.add_(len(batch[0]))
        return super().shared_step(batch) * (1 + self.seen / 100)


def few_of_marked(samples):
    """One sample only where a marked one is among them."""
    batch = default_collate(samples)
    return [column[:1] for column in batch] if bool((batch[2] > 0).any()) else batch


def small_data(marked):
    loaders = marked_data(marked)
    train = loaders["train_dataloaders"]
    return loaders | {"train_dataloaders": DataLoader(train.dataset, SIZE, collate_fn=few_of_marked)}


FEW = functools.partial(small_data, SAMPLES[2, 1])
SMALL = {place: functools.partial(small_data, SAMPLES[place]) for place in ((0, 0), (0, 1), (1, 1))}


@pytest.mark.parametrize(
    ("module", "make_data"),
    [*((Writes, MARKED[place]) for place in ((0, 1), (2, 1))), *((Decides, data) for data in SMALL.values())],
)
def test_one_replica_runs_unsplit_batches(worlds, module, make_data):
    report = check(worlds, module, REPLICAS, make_data=make_data, steps=4, num_microbatches=1)
    assert report.outcome == "same" and SHARDED in str(report), str(report)


# --- lengths ---------------------------------------------------------------------------------------------------------


class Sequences(Branches):
    """Sequences as long as the longest of their batch."""

    def shared_step(self, batch):
        x, y, _ = batch
        return F.mse_loss(self.head(self.body(x).mean(1)), y)


def padded(samples):
    x, y, marks = default_collate(samples)
    length = 2 + int(x[:, 0].abs().sum() * 10) % 4
    return x.unsqueeze(1) * torch.arange(1, length + 1, dtype=x.dtype).view(1, -1, 1) / 4, y, marks


def sequence_data():
    loaders = marked_data(None)
    return {name: DataLoader(loader.dataset, SIZE, collate_fn=padded) for name, loader in loaders.items()}


@pytest.mark.parametrize("layout", [REPLICAS, *ZERO], ids=lambda layout: layout.name)
def test_replicas_see_new_lengths_at_different_steps(worlds, layout):
    report = check(worlds, Sequences, layout, make_data=sequence_data, steps=6)
    assert report.outcome == "same", str(report)


# --- fewer microbatches ----------------------------------------------------------------------------------------------


class Plain(Branches):
    def shared_step(self, batch):
        x, y, _ = batch
        return F.mse_loss(self.head(self.body(x)), y)


BY_LAYER = {"zero_stage": 3, "reshard_after_forward": True}
FEWER = {
    "by layer": BY_LAYER,
    "by layer, recomputed": {**BY_LAYER, "recompute": "full"},
    "by step, recomputed": {"zero_stage": 3, "reshard_after_forward": False, "recompute": "full"},
    "stages by layer": {**BY_LAYER, "pipeline_parallel_size": 2},
    "several stages by layer": {**BY_LAYER, "pipeline_parallel_size": 2, "stages_per_rank": 2},
}


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("case", FEWER)
def test_one_replica_has_fewer_microbatches(worlds, case, accumulated):
    strategy = FEWER[case]
    layout = Layout(case, devices=2 * strategy.get("pipeline_parallel_size", 1), strategy=strategy)
    trainer = {"accumulate_grad_batches": accumulated}
    data = FEW if "stages" in case else SMALL[1, 1]  # the example of a pipeline's step must be a full batch
    report = check(worlds, Plain, layout, make_data=data, steps=4, num_microbatches=2, trainer=trainer)
    assert report.outcome == "same", str(report)
