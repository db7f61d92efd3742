"""Trials of a layer in a run leave nothing behind, and find what differs from the full layer."""

import gc
import sys
import weakref
from functools import partial

import numpy
import pytest
import torch
from torch import nn

from lightning_hybrid.step.tracing.lines import TorchCallSites
from lightning_hybrid.tensor.runtime.proved import ProvedCalls, dims_of_several, value_read_in

MADE = []


class Alone:
    """A sharded unit on one rank, as far as checks of its forwards ask it."""

    def set_path(self, path):
        pass

    def meet(self, error):
        pass

    def any_rank(self, vote):
        return vote


def checks_of(layer, args):
    isolated = partial(torch.random.fork_rng, devices=())
    return ProvedCalls(layer, frozenset(dims_of_several(args)), Alone(), lambda *call: frozenset(), isolated)


class Saves(nn.Module):
    """Its operations save their results for the backward."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        out = torch.sigmoid(self.linear(x)).exp()
        MADE.append(weakref.ref(out))
        return out


def test_graph_of_a_trial_is_freed():
    layer = Saves()
    args = (torch.ones(2, 3, requires_grad=True),)
    calls = checks_of(layer, args)
    assert calls.first_deviation(layer.forward, layer.forward, args, {}) == ""
    gc.collect()
    assert MADE and all(made() is None for made in MADE)


class Keeps(nn.Module):
    """Keeps values in its attributes that it computes of all positions."""

    def __init__(self):
        super().__init__()
        self.kept, self.largest, self.steps = {}, torch.zeros(()), 0

    def forward(self, x, part=slice(None)):
        x = x[part]
        self.steps += 1
        self.kept["mean"] = x.mean()
        self.largest.copy_(torch.maximum(self.largest, x.max()))
        return x.sum() * 0


def first_deviation(sharded, *args):
    layer = Keeps()
    calls = checks_of(layer, args)
    found = calls.first_deviation(lambda *args: sharded(layer, *args), layer.forward, args, {})
    assert layer.kept == {} and layer.steps == layer.largest == 0
    return found


def test_values_in_attributes_are_compared():
    x = torch.tensor([1.0, 2.0, 5.0])

    def local(layer, x):
        return layer(x, slice(2))

    def equal_mean(layer, x):
        return layer(x, slice(2)) + 0 * layer.kept["mean"].copy_(x.mean())

    def counts_twice(layer, x):
        layer.steps += 1
        return layer(x)

    assert first_deviation(Keeps.forward, x) == ""
    assert "the values of its attribute kept: relative difference" in first_deviation(local, x)
    assert "the values of its attribute largest: relative difference" in first_deviation(equal_mean, x)
    assert first_deviation(counts_twice, x) == "its attribute steps: 1, not 2"


READS = {
    "in": lambda x: 2 in x,
    "is_nonzero": lambda x: torch.is_nonzero(x[0]),
    "format": lambda x: f"{x[0]:.3g}",
    "asarray": lambda x: numpy.asarray(x),
    "item": lambda x: x[0].item(),
    "max": lambda x: max(x),
    "complex": lambda x: complex(x[0]),
}


@pytest.mark.parametrize("name", READS)
def test_reads_of_values(name):
    x = torch.tensor([1.0, 2.0])
    with TorchCallSites() as path:
        READS[name](x)
    assert value_read_in(path.calls) == f"{__file__}:{READS[name].__code__.co_firstlineno}"
    with TorchCallSites() as path:
        (x + 1).sum()
    assert value_read_in(path.calls) == ""


class Configured:
    """As a configuration that all layers of a model share."""

    def __init__(self):
        self.scale, self.sizes, self.names = 2, [1, 2, 3], {"act": "gelu"}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.config, self.index, self.kept, self.hooked = Configured(), 3, None, ()
        self.inner = nn.Sequential(*(nn.Linear(3, 3) for _ in range(8)))

    def forward(self, x):
        return self.inner(x)


def num_function_calls(run):
    calls = []
    sys.setprofile(lambda frame, event, arg: calls.append(event) if event in ("call", "c_call") else None)
    try:
        run()
    finally:
        sys.setprofile(None)
    return len(calls)


def test_a_known_call_costs_little_python():
    layer, args = Block(), (torch.ones(2, 3),)
    calls = checks_of(layer, args)
    first, later = (
        num_function_calls(lambda: calls.first_deviation(layer.forward, layer.forward, args, {})) for _ in range(2)
    )
    assert later < 100 < first / 10


def rebound(layer):
    layer.config = Configured()
    layer.config.scale = 3


CHANGES = {
    "attribute": lambda layer: setattr(layer, "index", 4),
    "new attribute": lambda layer: setattr(layer, "other", 4),
    "attribute removed": lambda layer: delattr(layer, "index"),
    "attribute of its configuration": lambda layer: setattr(layer.config, "scale", 3),
    "another configuration": rebound,
    "entry of a list": lambda layer: layer.config.sizes.__setitem__(1, 5),
    "longer list": lambda layer: layer.config.sizes.append(4),
    "entry of a dict": lambda layer: layer.config.names.update(act="relu"),
    "attribute of a module inside": lambda layer: setattr(layer.inner[2], "in_features", 4),
    "module added": lambda layer: layer.inner.append(nn.ReLU()),
    "module replaced": lambda layer: layer.inner.__setitem__(2, nn.Identity()),
    "mode of a module": lambda layer: layer.inner[2].eval(),
    "hook": lambda layer: layer.inner[2].register_forward_hook(lambda *_: None),
    "tensor kept": lambda layer: setattr(layer, "kept", torch.ones(3)),
    "container kept": lambda layer: setattr(layer, "hooked", [1]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_change_of_state_is_seen(name):
    layer, args = Block(), (torch.ones(2, 3),)
    calls = checks_of(layer, args)
    before = calls._key(args, {})
    assert calls._key(args, {}) == before
    CHANGES[name](layer)
    assert calls._key(args, {}) != before
    assert calls._key(args, {}) == checks_of(layer, args)._key(args, {})


class Keeper(nn.Module):
    def __init__(self):
        super().__init__()
        self.past, self.noise = {"keys": torch.ones(2)}, numpy.zeros(2)


def test_state_that_may_change_in_place_is_read_each_time():
    layer = Keeper()
    calls = checks_of(layer, ())
    before = calls._key((), {})
    layer.noise[1] = 3
    assert calls._key((), {}) != before
    held = weakref.ref(layer.past["keys"])
    layer.past = {}
    assert held() is None
