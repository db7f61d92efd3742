"""Layers whose activations have positions first, (T, B, C): the reference knows whose rows they are."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from harness.verification import check
from lightning_hybrid.verify import Layout
from models.regression import FEATURES, Regression

POSITIONS = 3
PP2 = Layout("pp2", devices=2, strategy={"pipeline_parallel_size": 2})
DP2 = Layout("dp2", devices=2)


class TimeFirst(Regression):
    """Positions before samples, as in ``nn.Transformer`` by default; a mean over labels that are not masked."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(self.make_block() for _ in range(3))
        self.head = nn.Linear(FEATURES, 3)

    def make_block(self):
        return nn.TransformerEncoderLayer(FEATURES, 2, 8, dropout=0.0)

    def loss(self, batch):
        x, _ = batch
        h = torch.stack([layer(x) for layer in self.layers[:POSITIONS]])
        for block in self.blocks:
            h = block(h)
        labels = (x[:, :POSITIONS].T * 1.49 + 1.5).long()
        return F.cross_entropy(self.head(h).flatten(0, 1), labels.masked_fill(x[:, 3:].T > 0.5, -100).flatten())


class WithDropout(TimeFirst):
    def make_block(self):
        return nn.TransformerEncoderLayer(FEATURES, 2, 8, dropout=0.2)


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES)

    def forward(self, h):
        return self.norm(self.linear(h).flatten(0, 1)).view(h.shape).tanh()


class WithBatchNorm(TimeFirst):
    def make_block(self):
        return Norm()


class SamplesFirst(Norm):
    """The same numbers in another order."""

    def forward(self, h):
        return super().forward(h.transpose(0, 1).contiguous()).transpose(0, 1)


class WithSamplesFirst(TimeFirst):
    def make_block(self):
        return SamplesFirst()


@pytest.mark.parametrize("layout", [PP2, DP2], ids=["pp2", "dp2"])
@pytest.mark.parametrize("module", [TimeFirst, WithDropout, WithSamplesFirst])
def test_time_first(worlds, module, layout):
    report = check(worlds, module, layout, steps=2)
    assert report.outcome == "same", str(report)
