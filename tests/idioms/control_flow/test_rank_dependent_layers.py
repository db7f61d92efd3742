"""Layers that not every rank calls, or not in the same order, where each layer is gathered separately."""

import pytest
import torch
from torch import nn

from harness.verification import check
from lightning_hybrid.verify import Layout
from models.regression import FEATURES, Regressor, regression_data

PER_LAYER = {"zero_stage": 3, "reshard_after_forward": True}
ZERO = Layout("zero3 by layer", devices=2, strategy=PER_LAYER)
FOUR = Layout("zero3 by layer over 4", devices=4, strategy=PER_LAYER)
RECOMPUTED = Layout("recomputed", devices=2, strategy={**PER_LAYER, "recompute": "full"})
STAGES = Layout("pp2 x zero3 by layer", devices=4, strategy={**PER_LAYER, "pipeline_parallel_size": 2})
SHARDS = Layout("pp2", devices=2, strategy={"pipeline_parallel_size": 2, "reshard_after_forward": True})


class Routed(Regressor):
    """Each sample is routed to one expert, and experts without samples are not called."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 1)
        self.experts = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(6))

    def route(self, x):
        return (x[:, 0] * 100).long().abs() % 6

    def forward(self, x):
        h = self.first(x)
        to, out = self.route(x), torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            mask = to == number
            if mask.any():
                out = out.index_put((mask.nonzero().squeeze(1),), expert(h[mask]))
        return self.head(h + out)


class RoutedByModel(Routed):
    """The model itself decides, so that no pipeline runs it."""

    def forward(self, x):
        h = self.first(x)
        out = [self.experts[int(row.argmax())](row[None]) for row in h]
        return self.head(h + torch.cat(out))


class InAnyOrder(Routed):
    """Two layers, in an order that the batch decides; other sizes than each other."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Sequential(nn.Linear(FEATURES, 20), nn.Tanh(), nn.Linear(20, FEATURES))

    def forward(self, x):
        layers = [self.experts[0], self.wide] if x[0, 0] > 0 else [self.wide, self.experts[0]]
        h = self.first(x)
        for layer in layers:
            h = layer(h)
        return self.head(h)


class ManyOrNone(Routed):
    """One rank may call no layer of many at all, and another reads a parameter outside of its layer."""

    def forward(self, x):
        h = self.first(x)
        if x[0, 1] > 0:
            for expert in self.experts:
                h = torch.tanh(expert(h))
        if x[0, 2] > 0:
            h = h * self.experts[3].weight.norm()
        return self.head(h)


CASES = [
    *((module, layout) for module in (Routed, InAnyOrder, ManyOrNone) for layout in (ZERO, RECOMPUTED)),
    (RoutedByModel, ZERO),
    (RoutedByModel, SHARDS),
    (Routed, FOUR),
    (Routed, STAGES),
]


def named(value):
    return getattr(value, "__name__", None) or value.name


def data():
    return regression_data(num_train=96, num_val=16)


@pytest.mark.parametrize(("module", "layout"), CASES, ids=named)
@pytest.mark.parametrize("count", [1, 2])
def test_matches_one_process(worlds, module, layout, count):
    # What the first sample of a microbatch decides is no mean over samples.
    count = 1 if module in (InAnyOrder, ManyOrNone) else count
    report = check(worlds, module, layout, make_data=data, steps=3, num_microbatches=count)
    assert report.outcome == "same", str(report)
