"""ZeRO: a network reads the weight of one of its layers directly, outside of that layer's forward."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from harness.fits import check
from harness.zero_runs import zero
from models.hand_written import WIDTH, Layers, mlp

EACH = {"per_layer": True}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.second(torch.tanh(self.first(x)))


class Network(nn.Module):
    """One unit where there is one stage, with layers inside that are gathered one by one."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Positions(Network):
    """A table of positions whose rows are sliced and that is never called."""

    def forward(self, x):
        return super().forward(x + self.table.weight[: x.shape[1]].mean(1))


class Relative(Network):
    """A table that is passed to layers."""

    def forward(self, x):
        relative = self.table.weight
        return super().forward(x) + F.linear(x, relative)


class TiedInside(Network):
    """Called, and read later, turned."""

    def forward(self, x):
        rows = self.table(x.abs().long().clamp(max=WIDTH - 1)).mean(1)
        return super().forward(x + rows) @ self.table.weight.T


class Penalised(Network):
    """Weights of layers that run are read again; their number of rows too."""

    def forward(self, x):
        weights = [block.first.weight for block in self.blocks]
        return super().forward(x) + sum((w @ w.T).mean() / w.shape[0] for w in weights) + self.table.weight.sum() * 0


def of(network):
    class Reads(Layers):
        def __init__(self):
            super().__init__(1)
            self.layers = nn.ModuleList([network()])

        def forward(self, x):
            return self.head(self.layers[0](x))

    Reads.__name__ = Reads.__qualname__ = f"Reads{network.__name__}"
    return Reads


ReadsPositions, ReadsRelative, ReadsTiedInside, ReadsPenalised = map(of, (Positions, Relative, TiedInside, Penalised))


class TwoNetworks(Layers):
    """Over stages each is a unit."""

    def __init__(self):
        super().__init__(1)
        self.layers = nn.ModuleList([Positions(), TiedInside(), mlp()])


MODULES = (ReadsPositions, ReadsRelative, ReadsTiedInside, ReadsPenalised)
RUNS = [
    *(zero(1, module, microbatches=1) for module in MODULES),
    *(zero(3, module, microbatches=1, **EACH) for module in MODULES),
    zero(3, TwoNetworks, pp=2, **EACH),
    zero(1, TwoNetworks, pp=2, validate=True),
]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.case.__name__}-pp{run.pp}-{run.strategy['zero_stage']}")
def test_parity(worlds, run):
    check(worlds, run)
