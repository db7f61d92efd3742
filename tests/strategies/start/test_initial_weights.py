"""The same seed does not always give the same weights on all ranks: those of the first rank are used."""

import os

import torch
from torch import nn

from harness.layouts import each_under
from harness.verification import COMBINED, LAYOUTS, TENSOR, check
from models.regression import FEATURES, Regression


def salt():
    """A number that differs between processes, as hashes of strings do; 0 on the first rank."""
    return int(os.environ.get("RANK", 0))


class HashOrdered(Regression):
    """Layers are initialised in the order of a set."""

    def __init__(self):
        super().__init__()
        order = [name for name, _ in self.named_parameters()]
        shift = 3 * salt() % len(order)
        for name in order[shift:] + order[:shift]:
            parameter = self.get_parameter(name)
            nn.init.normal_(parameter, std=0.5)
        self.register_buffer("offset", torch.full((FEATURES,), 0.1 * (1 + salt())))
        self.register_buffer("flags", torch.arange(FEATURES) % 2 == salt() % 2)

    def forward(self, x):
        return super().forward(torch.where(self.flags, x + self.offset, x))


class DrawsMoreOnOtherRanks(HashOrdered):
    """Other ranks have drawn more numbers when the run begins, and the step draws some too."""

    def __init__(self):
        super().__init__()
        torch.rand(1 + salt())
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        return super().forward(self.drop(x))


class MadeLate(HashOrdered):
    """The head is made in `setup`, from another seed on each rank."""

    def setup(self, stage):
        torch.manual_seed(7 + salt())
        self.head = nn.Linear(FEATURES, 1).double()


@each_under("module", [HashOrdered, DrawsMoreOnOtherRanks], [*LAYOUTS, COMBINED], slow=[TENSOR])
def test_weights_of_rank_0_are_used(worlds, module, layout):
    report = check(worlds, module, layout)
    assert report.outcome == "same", str(report)


def test_weights_made_in_setup(worlds):
    report = check(worlds, MadeLate, LAYOUTS[2])
    assert report.outcome == "same", str(report)
