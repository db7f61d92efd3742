"""Steps that change between batches: by batch index, counter, epoch, chance, or task."""

import random

import pytest
import torch
import torchmetrics
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from harness.fits import trainer_of
from harness.layouts import each_under
from harness.verification import BOTH, COMBINED, LAYOUTS, STAGES
from harness.verification import check_there_and_back as check
from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.step.replay.traces import TraceTree
from models.regression import FEATURES, Regression, regression_data


class UsedSometimes(Regression):
    """A branch of the model that every other batch takes, by its index."""

    def __init__(self):
        super().__init__()
        self.extra = nn.Linear(FEATURES, FEATURES)

    def training_step(self, batch, batch_idx):
        x, y = batch
        h = self.layers[0](x)
        if batch_idx % 2:
            h = h + self.extra(h)
        for layer in self.layers[1:]:
            h = layer(h)
        loss = F.mse_loss(self.head(h), y)
        self.log("loss", loss)
        return loss


class DropsLayers(Regression):
    """LayerDrop, of the microbatch: layers fall out by chance, as Python, numpy or torch draws it."""

    def forward(self, x):
        for layer in self.layers:
            if not (self.training and self.drawn() < 0.4):
                x = layer(x)
        return self.head(x)

    def drawn(self):
        return random.random()


class DropsLayersByTorch(DropsLayers):
    """Also stores a metric, whose last value still references the model when the next trace is recorded."""

    def __init__(self):
        super().__init__()
        self.error = torchmetrics.MeanAbsoluteError().set_dtype(torch.float64)

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self(x)
        self.log("mae", self.error(out, y))
        return F.mse_loss(out, y)

    def drawn(self):
        return torch.rand([])


class AlternatesLosses(Regression):
    """By the counter of the run."""

    def __init__(self):
        super().__init__()
        self.other_head = nn.Linear(FEATURES, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        h = x
        for layer in self.layers:
            h = layer(h)
        if self.global_step % 2:
            return F.l1_loss(self.other_head(h), y)
        return F.mse_loss(self.head(h), y)


class CountsByItself(Regression):
    """A penalty every third time that the step runs, counted by the step."""

    def __init__(self):
        super().__init__()
        self.runs = 0

    def training_step(self, batch, batch_idx):
        self.runs += 1
        loss = self.loss(batch)
        if self.runs % 3 == 0:
            loss = loss + 0.1 * self.layers[1][0].weight.square().sum()
        return loss


class Phases(Regression):
    """A hook decides; the step itself does not show it."""

    penalized = False

    def on_train_epoch_start(self):
        self.penalized = self.current_epoch > 0

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return loss + 0.1 * self.head.weight.square().sum() if self.penalized else loss


class Lengthens(Regression):
    """Curriculum: longer sequences in later epochs, visible only inside the model."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        seen = x.unsqueeze(1).repeat(1, 1 + self.current_epoch, 1)
        h = self(seen)
        return F.mse_loss(h.sum(1) / h.shape[1], y)


class StoresInSomeBatches(Regression):
    """Numbers that are stored in some batches only, and logged at the end."""

    def __init__(self):
        super().__init__()
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if batch_idx % 2:
            self.losses.append(loss.item())
        return loss

    def on_train_epoch_end(self):
        self.log("kept", sum(self.losses) / len(self.losses))
        self.losses.clear()


class SelectsHead(Regression):
    """A string in the batch selects the head that is trained."""

    def __init__(self):
        super().__init__()
        self.other_head = nn.Linear(FEATURES, 1)

    def training_step(self, batch, batch_idx):
        h = batch["x"]
        for layer in self.layers:
            h = layer(h)
        head = self.head if batch["task"] == "first" else self.other_head
        return F.mse_loss(head(h), batch["y"])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))


class OfTasks(torch.utils.data.Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x) // 8

    def __getitem__(self, i):
        return {"x": self.x[i * 8 : i * 8 + 8], "y": self.y[i * 8 : i * 8 + 8], "task": ("first", "second")[i % 2]}


def task_data():
    loaders = regression_data()
    return {
        name: DataLoader(OfTasks(*loader.dataset.tensors), batch_size=None, shuffle=False)
        for name, loader in loaders.items()
    }


class BranchesOnMask(Regression):
    """A term of the loss over the rows of a mask, where there are enough of them."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        h = self.layers[0](x)
        mask = (y > 0)[:, 0]
        loss, rows = self.loss(batch), self.head(h)[mask]
        return loss + rows.square().mean() if int(mask.sum()) > 1 else loss


class BranchesOnCount(Regression):
    """A penalty from a count on that only full batches reach; the first batch does not show it."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self(x)
        loss = F.mse_loss(out, y)
        return loss + out.square().mean() if batch_idx and int((y > -2).sum()) > 4 else loss


class ExitsEarly(Regression):
    """Some microbatches exit after the first layer, so that another stage has their logs."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        h = self.layers[0](x)
        if y[0] < 0:
            loss = h.square().mean()
        else:
            for layer in self.layers[1:]:
                h = layer(h)
            loss = F.mse_loss(self.head(h), y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("largest", loss, reduce_fx="max")
        return loss


class ValidatesByLoader(Regression):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        x, y = batch
        if dataloader_idx:
            y = self.layers[0](x).mean(1, keepdim=True)
        self.log(f"val_{dataloader_idx}", F.mse_loss(self(x), y), add_dataloader_idx=False)


def two_loaders():
    loaders = regression_data()
    return {**loaders, "val_dataloaders": [loaders["val_dataloaders"]] * 2}


ANY = [AlternatesLosses, CountsByItself, DropsLayersByTorch, Phases, Lengthens, StoresInSomeBatches, BranchesOnMask]


@pytest.mark.parametrize("module", ANY, ids=lambda module: module.__name__)
def test_steps_that_change(worlds, module):
    report = check(worlds, module, STAGES, epochs=2)
    assert report.outcome == "same", str(report)


@pytest.mark.parametrize("count", [2, 4])
def test_microbatches_log_on_different_stages(worlds, count):
    report = check(worlds, ExitsEarly, STAGES, num_microbatches=count)
    assert report.outcome == "same", str(report)


@pytest.mark.parametrize("layout", [STAGES, pytest.param(COMBINED, marks=pytest.mark.slow)], ids=str)
def test_microbatches_branch_as_their_batch(worlds, layout):
    report = check(worlds, BranchesOnCount, layout)
    assert report.outcome == "same" and "mixes" not in str(report), str(report)


@each_under("module", [UsedSometimes, DropsLayers], [*LAYOUTS, COMBINED])
def test_steps_that_change_under_every_layout(worlds, module, layout):
    report = check(worlds, module, layout, epochs=2)
    assert report.outcome == "same", str(report)


def test_batch_selects_the_task(worlds):
    report = check(worlds, SelectsHead, STAGES, make_data=task_data)
    assert report.outcome == "same", str(report)


def test_validation_loader_indices(worlds):
    report = check(worlds, ValidatesByLoader, BOTH, make_data=two_loaders)
    assert report.outcome == "same", str(report)


class WithoutBranches(Regression):
    """Returns its batch index, logs, and has constant attributes."""

    def __init__(self):
        super().__init__()
        self.weights = {"loss": 1.0}
        self.numbers = []

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch) * self.weights["loss"]
        self.log("loss", loss, prog_bar=True)
        return {"loss": loss, "batch": batch_idx}


class WeightPerEpoch(WithoutBranches):
    def on_train_epoch_start(self):
        self.weights["loss"] = 1.0 / (1 + self.current_epoch)


def count_dry_runs(module):
    runs = []
    dry_run = TraceTree.dry_run
    TraceTree.dry_run = lambda *args: runs.append(0) or dry_run(*args)
    try:
        strategy = Hybrid3DStrategy(pipeline_parallel_size=2, num_microbatches=2)
        trainer_of(2, strategy, [], max_epochs=3, limit_val_batches=1).fit(module().double(), **regression_data())
    finally:
        TraceTree.dry_run = dry_run
    return len(runs)


@pytest.mark.parametrize(("module", "count"), [(WithoutBranches, 0), (WeightPerEpoch, 8), (DropsLayers, 24)])
def test_dry_runs_are_few(worlds, module, count):
    """None for equal steps; where an attribute changes, one per microbatch of each step until it is constant."""
    found = worlds.run(2, count_dry_runs, module)
    assert found[0] == found[1] and (found[0] == count if module is not DropsLayers else found[0] >= count)


class DecidesByRank(Regression):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return loss * 2 if batch_idx and self.trainer.is_global_zero else loss


def test_diverging_ranks_are_reported_before_any_change(worlds):
    report = check(worlds, DecidesByRank, STAGES)
    assert "the operations of the step differ between the ranks of one replica" in report.message, str(report)
