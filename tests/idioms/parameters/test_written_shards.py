"""Parameters that are written while ranks hold shards of them: by the step (a teacher), and by a layer."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from harness.verification import check
from lightning_hybrid.verify import Layout
from models.momentum import MomentumAfterBatch, MomentumInPlaceInStep, MomentumInStep, NormalisesWeights
from models.regression import FEATURES, Regression

ZERO_1 = Layout("dp2 zero 1", 2, {"num_microbatches": 1, "zero_stage": 1})
ZERO_3 = Layout("dp2 zero 3", 2, {"num_microbatches": 1, "zero_stage": 3, "reshard_after_forward": False})
BY_LAYER = Layout("dp2 zero 3 by layer", 2, {"num_microbatches": 1, "zero_stage": 3, "reshard_after_forward": True})
TENSOR = Layout("tp2", 2, {"tensor_parallel_size": 2})
BOTH = Layout("pp2 x tp2", 4, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "num_microbatches": 1})


@pytest.mark.parametrize(
    "layout", [ZERO_1, ZERO_3, pytest.param(BY_LAYER, marks=pytest.mark.slow)], ids=lambda layout: layout.name
)
@pytest.mark.parametrize("module", [MomentumInStep, NormalisesWeights, MomentumAfterBatch, MomentumInPlaceInStep])
def test_writes_by_the_step(worlds, module, layout):
    report = check(worlds, module, layout, steps=3)
    assert report.outcome == "same", str(report)


class UnitNorm(nn.Module):
    """Each row of its weight is made unit before it is used, as heads for faces and prototypes do."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(FEATURES, FEATURES))

    def write(self):
        self.weight.data = F.normalize(self.weight.data, dim=1)

    def forward(self, x):
        if self.training:
            self.write()
        return F.linear(x, self.weight)


class MaxNorm(UnitNorm):
    def write(self):
        self.weight.data.div_(self.weight.data.norm(dim=1, keepdim=True).clamp(min=1))


class Clipped(UnitNorm):
    """Weights in a range, as of critics of Wasserstein's."""

    @torch.no_grad()
    def write(self):
        self.weight.clamp_(-0.5, 0.5)


class NormsItself(Regression):
    layer = UnitNorm

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers.append(nn.Sequential(self.layer(), nn.Tanh(), nn.Linear(FEATURES, FEATURES)))


class NormsItselfToMost(NormsItself):
    layer = MaxNorm


class ClipsItself(NormsItself):
    layer = Clipped


@pytest.mark.parametrize(
    "layout",
    [TENSOR, ZERO_3, *(pytest.param(each, marks=pytest.mark.slow) for each in (BOTH, BY_LAYER))],
    ids=lambda layout: layout.name,
)
@pytest.mark.parametrize("module", [NormsItself, NormsItselfToMost, ClipsItself])
def test_writes_by_a_layer(worlds, module, layout):
    report = check(worlds, module, layout, steps=3)
    assert report.outcome == "same", str(report)
