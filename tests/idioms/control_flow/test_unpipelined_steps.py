"""Steps that no pipeline can run: ranks hold shards, and split the batch only where the result stays equal."""

import warnings

import numpy
import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from harness.trainer_runs import trainer_of
from harness.verification import COMBINED, LAYOUTS, check
from lightning_hybrid.pipeline.kept import ModuleChanges
from models.regression import FEATURES, regression_data
from models.unpipelined import Branching, Contrasts, SomeRows

PP2, *_ = LAYOUTS


class Counting(Branching):
    """Logs sums over the samples, and stores the last batch, so that it runs unsplit."""

    def training_step(self, batch, batch_idx):
        self.log("seen", float(len(batch[0])), reduce_fx="sum", on_step=False, on_epoch=True)
        self.last = batch[0]
        return super().training_step(batch, batch_idx)


class Streams(Branching):
    """Carries a state that has a row per sample from batch to batch."""

    state = None

    def forward(self, x):
        h = super().forward(x)
        if not self.training:
            return h
        last = torch.zeros_like(h) if self.state is None else self.state[0]
        self.state = ((h + 0.5 * last).detach(), h.detach())
        return h + 0.1 * last


class Returns(Branching):
    """A hook reads the step's outputs for each sample."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        h = self(x)
        return {"loss": F.mse_loss(h, y), "h": h}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        assert len(outputs["h"]) == len(batch[0])
        self.log("spread", outputs["h"].std())


class Inner(Branching):
    """Takes an inner step for every four samples: half a batch would take half the steps."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        for x, y in zip(*(column.split(4) for column in batch), strict=True):
            loss = F.mse_loss(self(x), y)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        self.log("train_loss", loss)


class WritesParameters(Branching):
    """A codebook that follows the batches, as a parameter without gradient."""

    def __init__(self):
        super().__init__()
        self.codes = nn.Parameter(torch.zeros(FEATURES), requires_grad=False)

    def training_step(self, batch, batch_idx):
        self.codes.data.mul_(0.9).add_(0.1 * batch[0].mean(0))
        x, y = batch
        loss = F.mse_loss(self(x - self.codes), y)
        self.log("train_loss", loss)
        return loss


class CountsSamples(Branching):
    """A number of samples decides."""

    seen = 0

    def training_step(self, batch, batch_idx):
        self.seen += len(batch[0])
        return super().training_step(batch, batch_idx) * (1 + self.seen / 100)


class CountsWithNumpy(Branching):
    """Stores a matrix of counts outside torch, which weighs the loss."""

    def __init__(self):
        super().__init__()
        self.counts = numpy.zeros((2, 2))

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self(x)
        for wanted, found in zip((y > 0).flatten().tolist(), (out > 0).flatten().tolist(), strict=True):
            self.counts[int(wanted), int(found)] += 1
        loss = F.mse_loss(out, y) * (1 + float(self.counts[1].sum()) / 100)
        self.log("train_loss", loss)
        return loss


CASES = [
    *((module, PP2) for module in (Branching, Counting, Streams, Returns, Inner)),
    *((module, PP2) for module in (Contrasts, SomeRows, CountsSamples, WritesParameters, CountsWithNumpy)),
    (Branching, COMBINED),
    (Contrasts, COMBINED),
]


@pytest.mark.parametrize(("module", "layout"), CASES, ids=lambda value: getattr(value, "__name__", None) or value.name)
def test_matches_one_process(worlds, module, layout):
    report = check(worlds, module, layout, steps=3)
    assert report.outcome == "same", str(report)
    assert "sharded instead of pipelined" in str(report)


class StoresLater(Branching):
    """From the third batch on it stores statistics, which scale its loss."""

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(1))
        self.bank, self.counts, self.seen = torch.zeros(4), numpy.zeros(2), []

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self(x)
        if self.trainer.fit_loop.epoch_loop.total_batch_idx >= 2:
            self.center.mul_(0.5).add_(out.detach().mean(0))
            self.bank[1] += out.detach().sum()
            self.counts[0] += len(x)
        loss = F.mse_loss(out + 0.1 * self.center + 0.01 * self.bank[1], y) * (1 + float(self.counts[0]) / 100)
        self.log("train_loss", loss)
        self.seen.append(loss.detach())
        return loss

    def on_train_epoch_end(self):
        self.log("seen", float(len(self.seen)))


class ContrastsLater(Branching):
    """Compares samples with each other from the third batch on."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self(x)
        loss = F.mse_loss(out, y)
        if self.trainer.fit_loop.epoch_loop.total_batch_idx >= 2:
            loss = loss + 0.1 * F.cross_entropy(out @ y.T, torch.arange(len(x)))
        self.log("train_loss", loss)
        return loss


class ContrastsByEpoch(Branching):
    """Weighs the comparison by the epoch; the first has none."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self(x)
        loss = F.mse_loss(out, y) + 0.1 * self.current_epoch * F.cross_entropy(out @ y.T, torch.arange(len(x)))
        self.log("train_loss", loss)
        return loss


def longer_data():
    return regression_data(num_train=96)


LATER = [
    (PP2, {"num_microbatches": 1}),
    (PP2, {"num_microbatches": 2}),
    (COMBINED, {"num_microbatches": 1}),
    (PP2, {"num_microbatches": 1, "trainer": {"accumulate_grad_batches": 3}}),
    (COMBINED, {"num_microbatches": 1, "trainer": {"accumulate_grad_batches": 4}}),
]


class RampsUp(Branching):
    """Weighs the comparison by an attribute, which is 0 at first."""

    def __init__(self):
        super().__init__()
        self.weight = 0.0

    def on_train_batch_start(self, batch, batch_idx):
        self.weight = 0.1 * (self.trainer.fit_loop.epoch_loop.total_batch_idx >= 2)

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self(x)
        return F.mse_loss(out, y) + self.weight * F.cross_entropy(out @ y.T, torch.arange(len(x)))


class Flags(Branching):
    """Stores a decision of one batch for the next."""

    def __init__(self):
        super().__init__()
        self.is_hard, self.phase = False, "easy"

    def training_step(self, batch, batch_idx):
        scale = 2 if self.is_hard else 1
        loss = scale * super().training_step(batch, batch_idx)
        self.is_hard, self.phase = bool(loss > 0.3), "hard" if loss > 0.3 else "easy"
        return loss


class SkipsSome(Branching):
    """Skips a batch whose loss is small, which is not small on each share."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx and loss.item() < 0.35 else loss


class Tracker:
    """Has a state, and is called."""

    def __init__(self):
        self.mean = 1.0

    def __call__(self, loss):
        self.mean = 0.5 * self.mean + 0.5 * loss
        return self.mean


class Tracks(Branching):
    def __init__(self):
        super().__init__()
        self.track = Tracker()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * self.track(loss.item())


def trained(module_class, devices, options, epochs):
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    if options is None:
        trainer = Trainer(accelerator="cpu", max_epochs=epochs, precision="64-true", logger=False, **QUIET)
    else:
        trainer = trainer_of(devices, 2, max_epochs=epochs, precision="64-true", strategy_options=options)
    torch.manual_seed(0)
    module = module_class()
    loader = regression_data(num_train=48)["train_dataloaders"]
    trainer.fit(module, DataLoader(loader.dataset, 8))
    return [parameter.detach() for parameter in module.parameters()]


QUIET = dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
ALONE = [(ContrastsLater, 1), (ContrastsByEpoch, 3), (RampsUp, 1), (Flags, 1), (SkipsSome, 1), (Tracks, 1)]


@pytest.mark.parametrize(("module", "epochs"), ALONE, ids=lambda value: getattr(value, "__name__", str(value)))
def test_weights_match_plain_lightning(worlds, module, epochs):
    """Steps whose result would change on shares, from the first batch on or later."""
    [expected] = worlds.run(1, trained, module, 1, None, epochs)
    for found in worlds.run(2, trained, module, 2, {"num_microbatches": 1}, epochs):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("layout", "options"), LATER, ids=lambda value: getattr(value, "name", None) or str(value))
def test_step_that_stores_only_later_is_rerun_unsplit(worlds, layout, options):
    report = check(worlds, StoresLater, layout, make_data=longer_data, steps=5, **options)
    assert report.outcome == "same" and "sharded instead of pipelined" in str(report), str(report)


class HoldsState(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.table, self.extra = numpy.zeros(3), torch.ones(2)
        self.state, self.outputs, self.by_loader, self.steps, self.best = None, [], {0: []}, 0, 1.0


def appends(module):
    module.outputs.append(torch.ones(1))
    module.by_loader[0].append({"loss": torch.ones(1)})
    module.steps += 1


LEAVES = {
    "nothing": (lambda module: None, False),
    "what lists have grown by": (appends, False),
    "a buffer": (lambda module: module.count.add_(1), True),
    "a tensor": (lambda module: setattr(module, "state", torch.ones(1)), True),
    "a tuple": (lambda module: setattr(module, "state", (torch.ones(1), torch.ones(1))), True),
    "a number of samples": (lambda module: setattr(module, "steps", module.steps + 8), True),
    "a number that was not there": (lambda module: setattr(module, "size", 8), True),
    "a float": (lambda module: setattr(module, "best", 0.5), True),
    "a buffer by its data": (lambda module: module.count.data.add_(1), True),
    "an array": (lambda module: module.table.__setitem__(1, 4.0), True),
    "a tensor that is gone": (lambda module: delattr(module, "extra"), True),
    "an entry of a list": (lambda module: module.outputs.__setitem__(0, torch.ones(1)), True),
}


@pytest.mark.parametrize("case", LEAVES)
def test_side_effects_of_steps(case):
    step, leaves = LEAVES[case]
    module = HoldsState()
    module.outputs.append(torch.zeros(1))
    left = ModuleChanges(module, by_content=True)
    step(module)
    assert left.something() is leaves
