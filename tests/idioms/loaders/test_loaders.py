"""Sample order and loaders of users: the step sees the same batches as in one process."""

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.nn import functional as F
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from harness.layouts import each, under
from harness.trainer_runs import ignore_warnings, trainer_of
from harness.verification import COMBINED, LAYOUTS, TENSOR, check
from models.regression import FEATURES, Plain, regression_data

STAGES = [layout for layout in LAYOUTS if layout.replicas == 1]
by_layout = under([*LAYOUTS[1:], COMBINED], slow=[TENSOR])
one_replica = under(STAGES)
DP_PP = LAYOUTS[2]


def samples(num=32):
    return regression_data(num_train=num)["train_dataloaders"].dataset


# --- order -----------------------------------------------------------------------------------------------------------


class Weighs(Plain):
    """Its loss depends on the order of the samples."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        weights = torch.linspace(0, 1, len(x), dtype=x.dtype)
        self.log("first", x[0, 0])
        return ((self(x) - y).square().squeeze(1) * weights).mean() * (1 + batch_idx)


def in_order():
    return DataLoader(samples(), batch_size=8, shuffle=False)


def weighted():
    generator = torch.Generator().manual_seed(3)
    sampler = WeightedRandomSampler(torch.linspace(0.1, 1, 32), 32, generator=generator)
    return DataLoader(samples(), batch_size=8, sampler=sampler)


@by_layout
def test_user_sampler_order(worlds, layout):
    report = check(worlds, Weighs, layout, make_data=in_order)
    assert report.outcome == "same", str(report)


@one_replica
def test_sampler_with_a_generator(worlds, layout):
    report = check(worlds, Weighs, layout, make_data=weighted)
    assert report.outcome == "same", str(report)


# --- loaders ---------------------------------------------------------------------------------------------------------


class DrawsLists(Dataset):
    """Gets the full list of indices of a batch sampler."""

    def __len__(self):
        return 32

    def __getitem__(self, indices):
        x, y = samples().tensors
        return x[indices], y[indices]


def batch_sampler_as_sampler():
    data = DrawsLists()
    sampler = BatchSampler(SequentialSampler(data), batch_size=8, drop_last=False)
    return DataLoader(data, sampler=sampler, batch_size=None)


def batch_sampler():
    data = samples()
    return DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), batch_size=8, drop_last=True))


class Stream(IterableDataset):
    def __iter__(self):
        data = samples()
        yield from (data[i] for i in range(len(data)))


def stream():
    return DataLoader(Stream(), batch_size=8)


class BatchDataset(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        x, y = samples().tensors
        return x[index * 4 : index * 4 + 4], y[index * 4 : index * 4 + 4]


def without_batch_size():
    return DataLoader(BatchDataset(), batch_size=None)


class CustomIterable:
    """No DataLoader at all."""

    def __iter__(self):
        return (BatchDataset()[index] for index in range(8))

    def __len__(self):
        return 8


def custom_iterable():
    return {"train_dataloaders": CustomIterable(), "val_dataloaders": CustomIterable()}


def short_last():
    return DataLoader(samples(26), batch_size=8)


KINDS = [batch_sampler_as_sampler, stream, without_batch_size, custom_iterable, short_last]


# With stages only, they are among the kinds of `strategies/user_code/test_loaders.py`.
@each("make_data", KINDS, covered_by={without_batch_size: stream, short_last: stream})
@under([STAGES[0], DP_PP])
def test_kinds_of_loaders(worlds, make_data, layout):
    report = check(worlds, Plain, layout, make_data=make_data, steps=4)
    assert report.outcome == "same", str(report)


@one_replica
def test_batch_sampler(worlds, layout):
    report = check(worlds, Plain, layout, make_data=batch_sampler)
    assert report.outcome == "same", str(report)


def recorded_shapes(kind):
    ignore_warnings()
    module, data = RecordsShapes().double(), samples(24)
    sampler = kind(SequentialSampler(data), batch_size=4, drop_last=True)
    trainer_of(2).fit(module, DataLoader(data, batch_sampler=sampler), DataLoader(data, batch_sampler=sampler))
    return module.seen


class RecordsShapes(Plain):
    def __init__(self):
        super().__init__()
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append((batch_idx, *batch[0].shape))
        return super().training_step(batch, batch_idx)


class CustomBatchSampler(BatchSampler):
    pass


@pytest.mark.parametrize("kind", [BatchSampler, CustomBatchSampler])
def test_batch_sampler_over_replicas(worlds, kind):
    assert worlds.run(2, recorded_shapes, kind) == [[(0, 4, FEATURES), (1, 4, FEATURES), (2, 4, FEATURES)]] * 2


class TwoSources(Plain):
    """Semi-supervised: labelled and unlabelled batches side by side, of different sizes."""

    def training_step(self, batch, batch_idx):
        labelled, (x, _) = batch["labelled"], batch["unlabelled"]
        loss = F.mse_loss(self(labelled[0]), labelled[1])
        consistency = (self(x) - self(x.roll(1, 1))).square().mean()
        self.log_dict({"supervised": loss, "consistency": consistency})
        return loss + 0.1 * consistency


class ListOfSources(Plain):
    def training_step(self, batch, batch_idx):
        a, b = batch
        return F.mse_loss(self(a[0]), a[1]) + F.l1_loss(self(b[0]), b[1])


class EitherSource(Plain):
    """Sequential in training: the step receives the index of the batch's loader."""

    def training_step(self, batch, batch_idx, dataloader_idx):
        x, y = batch
        return F.mse_loss(self(x), y) if dataloader_idx == 0 else 2 * F.mse_loss(self(x), y)


def dict_of_loaders(sizes=(8, 8)):
    labelled, unlabelled = samples(32), samples(48)
    return {
        "train_dataloaders": {
            "labelled": DataLoader(labelled, sizes[0], shuffle=True),
            "unlabelled": DataLoader(unlabelled, sizes[1]),
        }
    }


def dict_of_unequal_loaders():
    return dict_of_loaders((8, 4))


def list_of_loaders():
    return {"train_dataloaders": [DataLoader(samples(), 8), DataLoader(samples(16), 8, shuffle=True)]}


def shortest_of_loaders():
    return {"train_dataloaders": CombinedLoader(list_of_loaders()["train_dataloaders"], mode="min_size")}


@pytest.mark.parametrize(
    ("module", "make_data"),
    [(TwoSources, dict_of_loaders), (ListOfSources, list_of_loaders), (ListOfSources, shortest_of_loaders)],
)
@by_layout
def test_several_loaders_at_once(worlds, module, make_data, layout):
    report = check(worlds, module, layout, make_data=make_data)
    assert report.outcome == "same", str(report)


def test_batches_of_different_sizes_run_as_one_microbatch(worlds):
    report = check(worlds, TwoSources, DP_PP, make_data=dict_of_unequal_loaders, num_microbatches=None)
    assert report.outcome == "same", str(report)
    report = check(worlds, TwoSources, DP_PP, make_data=dict_of_unequal_loaders)
    assert report.outcome == "same", str(report)


class ModuleLoaders(Plain):
    """Everything on the module; validation on two sets."""

    def prepare_data(self):
        self.prepared = True

    def setup(self, stage):
        self.samples = samples()

    def train_dataloader(self):
        return DataLoader(self.samples, batch_size=8, shuffle=True)

    def val_dataloader(self):
        return [DataLoader(self.samples, batch_size=8), DataLoader(samples(16), batch_size=4)]

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        x, y = batch
        self.log("val_loss", F.mse_loss(self(x), y))
        self.log(f"val_{dataloader_idx}", F.l1_loss(self(x), y), add_dataloader_idx=False)


@by_layout
def test_loaders_of_the_module(worlds, layout):
    report = check(worlds, ModuleLoaders, layout, make_data=None)
    assert report.outcome == "same", str(report)


class ReplayMemory(Plain):
    """Reinforcement learning: the batch is a placeholder, the samples are drawn in the step."""

    def __init__(self):
        super().__init__()
        self.memory = samples(32)
        self.num_drawn = 0

    def training_step(self, batch, batch_idx):
        index = torch.randint(0, len(self.memory), (8,))
        x, y = self.memory[index]
        self.num_drawn += 1
        loss = F.mse_loss(self(x), y)
        self.log_dict({"loss": loss, "num_drawn": float(self.num_drawn)}, prog_bar=True)
        return loss


def ticks():
    return DataLoader(TensorDataset(torch.arange(24.0)), batch_size=4)


@by_layout
def test_samples_drawn_in_the_step(worlds, layout):
    report = check(worlds, ReplayMemory, layout, make_data=ticks)
    assert report.outcome == "same", str(report)
