"""Parameters that the step or hooks write: momentum teachers, averages that are validated, bounded weights."""

import copy

import torch
from torch.nn import functional as F

from harness.layouts import each_under
from harness.verification import BOTH, LAYOUTS, check
from models.momentum import (
    Momentum,
    MomentumAfterBatch,
    MomentumBeforeBatch,
    MomentumInPlace,
    MomentumInPlaceInStep,
    MomentumInStep,
    NormalisesWeights,
)
from models.regression import Regression


class MomentumThroughData(Momentum):
    """At the step's end, through views without a version."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        for p_q, p_k in zip(self.layers.parameters(), self.encoder_k.parameters(), strict=True):
            p_k.data.mul_(0.9).add_(p_q.data, alpha=0.1)
        return loss


class MomentumByCopy(Momentum):
    """The mixture is made first, last layers first."""

    @torch.no_grad()
    def training_step(self, batch, batch_idx):
        pairs = list(zip(self.layers.parameters(), self.encoder_k.parameters(), strict=True))
        for p_q, p_k in reversed(pairs):
            p_k.copy_(0.9 * p_k + 0.1 * p_q)
        with torch.enable_grad():
            return super().training_step(batch, batch_idx)


class MomentumInLists(Momentum):
    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            torch._foreach_lerp_(list(self.encoder_k.parameters()), list(self.layers.parameters()), 0.1)
        return super().training_step(batch, batch_idx)


class SwapsAverages(Regression):
    """An exponential moving average of the weights is validated, and taken back out afterwards."""

    def on_fit_start(self):
        self.average = [p.detach().clone() for p in self.parameters()]

    @torch.no_grad()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        for average, p in zip(self.average, self.parameters(), strict=True):
            average.lerp_(p, 0.3)

    def on_validation_epoch_start(self):
        self.collected = [p.clone() for p in self.parameters()]
        for average, p in zip(self.average, self.parameters(), strict=True):
            p.data.copy_(average.data)

    def on_validation_epoch_end(self):
        for kept, p in zip(self.collected, self.parameters(), strict=True):
            p.data.copy_(kept.data)
        del self.collected


class SwapsByStateDict(Regression):
    """A copy of the module is averaged and takes the module's place in validation."""

    def __init__(self):
        super().__init__()
        self.averaged = copy.deepcopy(self.layers).requires_grad_(False)

    @torch.no_grad()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        for name, p in self.layers.named_parameters():
            average = self.averaged.get_parameter(name)
            average.copy_(0.7 * average + 0.3 * p)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        for layer in self.averaged:
            x = layer(x)
        self.log("val_loss", F.mse_loss(self.head(x), y))


class CollectsMoments(Regression):
    """First and second moments of the weights by name, as in SWAG; a sample is validated."""

    def on_fit_start(self):
        self.moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in self.named_parameters()}
        self.count = 0

    @torch.no_grad()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        for name, p in self.named_parameters():
            mean, square = self.moments[name]
            mean.mul_(self.count).add_(p.data).div_(self.count + 1)
            square.mul_(self.count).add_(p.data**2).div_(self.count + 1)
        self.count += 1

    @torch.no_grad()
    def on_validation_start(self):
        self.before = {name: p.data.clone() for name, p in self.named_parameters()}
        for name, p in self.named_parameters():
            mean, square = self.moments[name]
            p.data = mean + 0.1 * torch.clamp(square - mean**2, 1e-30).sqrt()

    def on_validation_end(self):
        for name, p in self.named_parameters():
            p.data = self.before[name]


class ClampsWeights(Regression):
    """Weights are bounded after each step, as critics' are, and re-normalised."""

    @torch.no_grad()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        for p in self.layers.parameters():
            p.data.clamp_(-0.3, 0.3)
        self.head.weight.div_(self.head.weight.norm())


HOOKED = [MomentumAfterBatch, MomentumBeforeBatch, MomentumInPlace, SwapsAverages, SwapsByStateDict, CollectsMoments]


@each_under(
    "module", [*HOOKED, ClampsWeights], [LAYOUTS[0], BOTH], covered_by={MomentumBeforeBatch: MomentumAfterBatch}
)
def test_parameters_written_in_hooks(worlds, module, layout):
    report = check(worlds, module, layout, epochs=2, steps=2)
    assert report.outcome == "same", str(report)


WRITING = [
    MomentumInStep,
    MomentumInPlaceInStep,
    MomentumThroughData,
    MomentumByCopy,
    MomentumInLists,
    NormalisesWeights,
]


COVERED = {MomentumByCopy: MomentumInStep, MomentumInPlaceInStep: MomentumInStep}


@each_under("module", WRITING, [LAYOUTS[0], BOTH, LAYOUTS[3]], covered_by=COVERED)
def test_parameters_written_in_the_step(worlds, module, layout):
    report = check(worlds, module, layout)
    assert report.outcome == "same", str(report)
