"""Values that cross a cut keep their memory format, on which dropout and other draws depend."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from harness.fits import Run, assert_parity, fit, fit_joined_batches, reference_of
from harness.simulated_host import TRANSPORTS
from models.hand_written import WIDTH, Layers, mlp


class Turned(nn.Module):
    """Passes on a view that is not contiguous."""

    def __init__(self):
        super().__init__()
        self.body = mlp()

    def forward(self, x):
        return self.body(x).view(-1, 4, WIDTH // 4).transpose(1, 2)


class Sliced(Turned):
    """A view with gaps."""

    def forward(self, x):
        return super().forward(x.repeat_interleave(2, 0))[::2, :, 1:]


class Drops(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(features, 4)

    def forward(self, x):
        return self.head(self.drop(x).flatten(1))


class TurnedDropout(Layers):
    kind_of_first, features = Turned, WIDTH

    def __init__(self):
        super().__init__(1)
        self.layers = nn.ModuleList([mlp(), self.kind_of_first(), Drops(self.features), nn.Linear(4, 4)])
        self.head = nn.Identity()

    def loss(self, batch):
        x = batch["x"]
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(x, batch["label"])


class SlicedDropout(TurnedDropout):
    kind_of_first, features = Sliced, WIDTH - WIDTH // 4


class TurnedNoise(TurnedDropout):
    """The step itself draws as much noise, in the same order in memory."""

    def loss(self, batch):
        x = self.layers[1](self.layers[0](batch["x"]))
        x = x + 0.1 * torch.randn_like(x)
        return F.cross_entropy(self.layers[3](self.layers[2](x)), batch["label"])


class ChannelsLast(TurnedDropout):
    kind = "images"

    def __init__(self):
        super().__init__()
        drops = nn.Sequential(nn.Dropout(0.3), nn.Conv2d(8, 8, 1))
        self.layers = nn.ModuleList([nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), drops, nn.Conv2d(8, 4, 3)])

    def loss(self, batch):
        x = batch["pixel_values"].to(memory_format=torch.channels_last)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(x.mean((2, 3)), batch["labels"])


CUT = {"pipeline_cuts": ["layers.2"]}
CASES = [(case, name) for case in (TurnedDropout, SlicedDropout, TurnedNoise, ChannelsLast) for name in TRANSPORTS]


def fit_around(run, name):
    with TRANSPORTS[name]():
        return fit(run)


@pytest.mark.parametrize(
    ("case", "name"),
    [
        pytest.param(*each, marks=[] if each[0] is TurnedDropout or each[1] == "one host" else [pytest.mark.slow])
        for each in CASES
    ],
)
def test_parity(worlds, case, name):
    run = Run(case, pp=2, strategy=CUT)
    expected = reference_of(worlds, run, fit_joined_batches)
    ranks = worlds.run(2, fit_around, run, name)
    assert [len(units) for units in ranks[0].units] == [2, 2]
    assert_parity(ranks, expected, run)
