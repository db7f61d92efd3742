"""Model values that submodules store: the reference stores them as the strategy does."""

import torch
from torch import nn
from torch.nn import functional as F

from harness.verification import check
from lightning_hybrid.verify import Layout
from models.regression import FEATURES, Regression

LAYOUTS = [
    Layout("m2", 1, {"pipeline_parallel_size": 1, "num_microbatches": 2}),
    Layout("dp2 x pp2", 4, {"pipeline_parallel_size": 2, "num_microbatches": 2}),
]


class StoresMoments(nn.Module):
    """A loss without parameters that stores a moving mean of its batches, as TiCo's does."""

    def __init__(self):
        super().__init__()
        self.moments = torch.zeros(FEATURES, FEATURES, dtype=torch.float64)

    def forward(self, h):
        self.moments = 0.9 * self.moments.detach() + 0.1 * (h.T @ h) / len(h)
        return (h @ self.moments * h).mean()


class StoresMomentsInBuffer(StoresMoments):
    def __init__(self):
        super().__init__()
        del self.moments
        self.register_buffer("moments", torch.zeros(FEATURES, FEATURES, dtype=torch.float64))


class WithCriterion(Regression):
    kind = StoresMoments

    def __init__(self):
        super().__init__()
        self.criterion = self.kind()

    def training_step(self, batch, batch_idx):
        x, y = batch
        h = x
        for layer in self.layers:
            h = layer(h)
        return F.mse_loss(self.head(h), y) + self.criterion(h)


class WithBuffer(WithCriterion):
    kind = StoresMomentsInBuffer


def test_tensor_stored_by_a_loss_is_that_before_the_batch(worlds):
    for layout in LAYOUTS:
        report = check(worlds, WithCriterion, layout, steps=3)
        assert report.outcome == "same", str(report)


def test_buffer_is_updated_per_microbatch(worlds):
    for layout in LAYOUTS:
        report = check(worlds, WithBuffer, layout, steps=3)
        assert report.outcome == "same", str(report)
