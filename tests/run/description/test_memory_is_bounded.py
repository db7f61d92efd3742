"""The memory that a run in stages says it takes "up to" bounds what each rank measures."""

import itertools

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from harness.fits import trainer_of
from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.callbacks import MemoryMonitor


class Classifier(LightningModule):
    """Of layers that a subclass makes, and a head."""

    shape = (64,)

    def __init__(self):
        super().__init__()
        self.net, self.head = nn.Sequential(*self.layers()), nn.Linear(16, 10)

    def training_step(self, batch, batch_idx):
        h = self.net(batch[0])
        return F.cross_entropy(self.head(h.flatten(2).mean(2) if h.dim() > 2 else h[:, :16]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


class Convolutions(Classifier):
    shape = (3, 16, 16)

    def layers(self):
        pairs = itertools.pairwise([3, *[16] * 6])
        return [nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()) for a, b in pairs]


class ReadsOldGradients(Convolutions):
    def on_before_zero_grad(self, optimizer):
        self.norm = sum(float(p.grad.norm()) for p in self.parameters() if p.grad is not None)


class Perceptron(Classifier):
    def layers(self):
        return [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6)]


class Transformer(Classifier):
    shape = (16, 64)

    def layers(self):
        return [nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, norm_first=True) for _ in range(4)]

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.head(self.net(batch[0]).mean(1)[:, :16]), batch[1])


def measure(kind, size, options):
    """The measured and the predicted peak of each rank."""
    torch.manual_seed(0)
    monitor = MemoryMonitor(step=3)
    options = dict(options)
    accumulated = options.pop("accumulated", 1)
    strategy = Hybrid3DStrategy(pipeline_parallel_size=2, num_microbatches=4, **options)
    data = TensorDataset(torch.randn(96, *kind.shape), torch.randint(0, 10, (96,)))
    trainer_of(size, strategy, [monitor], accumulate_grad_batches=accumulated).fit(kind(), DataLoader(data, 16))
    return [(rank["peak"], rank["predicted_total"]) for rank in monitor.measured]


OPTIONS = {
    "pp2": (2, {}),
    "pp2, accumulated": (2, {"accumulated": 2}),
    "pp2, recomputed": (2, {"recompute": "full"}),
    "pp2 x dp2": (4, {}),
    "pp2 x zero1": (4, {"zero_stage": 1}),
    "pp2 x zero3": (4, {"zero_stage": 3}),
}


@pytest.mark.parametrize("kind", [Convolutions, ReadsOldGradients, Perceptron, Transformer])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_estimate_bounds_what_is_measured(worlds, name, kind):
    size, options = OPTIONS[name]
    for peak, predicted in worlds.run(size, measure, kind, size, options, timeout=100)[0]:
        assert 0.5 * predicted <= peak <= predicted, f"measured {peak:,}, predicted {predicted:,}"


class Split(nn.Module):
    """A block with a list of layers."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(2))

    def forward(self, x):
        return sum(part(x) for part in self.parts)


class Blocks(Classifier):
    def layers(self):
        return [Split() for _ in range(6)]


def test_blocks_recomputed_as_one(worlds):
    for peak, predicted in worlds.run(2, measure, Blocks, 2, {"recompute": [Split]}, timeout=100)[0]:
        assert 0.5 * predicted <= peak <= predicted, f"measured {peak:,}, predicted {predicted:,}"
