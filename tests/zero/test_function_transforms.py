"""ZeRO: transforms of ``torch.func`` around layers, whose parameters are gathered inside."""

import pytest
import torch
from torch.nn import functional as F

from harness.fits import check
from harness.zero_runs import zero
from models.hand_written import Layers


class Slopes(Layers):
    """The loss has the gradient of a function of all layers, and a weight that is read outside of its layer."""

    def of_one(self, x):
        return (self(x) * self.head.weight.mean(1)).sum()

    def slopes(self, x):
        return torch.func.grad(self.of_one)(x)

    def loss(self, batch):
        x = batch["x"]
        return F.cross_entropy(self(x), batch["label"]) + self.slopes(x).square().mean()


class MappedSlopes(Slopes):
    def slopes(self, x):
        return torch.func.vmap(torch.func.grad(self.of_one))(x)


@pytest.mark.parametrize(
    ("case", "per_layer"),
    [
        (MappedSlopes, True),
        pytest.param(Slopes, True, marks=pytest.mark.slow),
        pytest.param(MappedSlopes, False, marks=pytest.mark.slow),
    ],
)
def test_parity(worlds, case, per_layer):
    check(worlds, zero(3, case, per_layer=per_layer))
