"""Inputs of tensor-parallel regions, and weights too small for a region."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from lightning_hybrid.params.placement import Replicated
from lightning_hybrid.tensor.runtime.linears import RegionInputs
from lightning_hybrid.tensor.search.model import ModelSearch
from lightning_hybrid.tensor.search.uses import record_calls


class Doubling:
    """Two ranks with the same gradients."""

    rank, size = 0, 2

    def all_reduce(self, tensor):
        tensor.mul_(2)


@pytest.mark.parametrize("fresh", [[True], [True, True], [False], [True, False], [False, True]], ids=str)
def test_separate_reader_gradients_are_summed_in_place(fresh):
    ranks = Doubling()
    entrances = RegionInputs(ranks, ranks, gathers=False)
    x, gradient = torch.ones(3, requires_grad=True), torch.ones(3)
    with entrances:
        inside = [entrances.enter(x, ranks, fresh=each) for each in fresh]
    assert all(value is inside[0] for value in inside)
    inside[0].backward(gradient)
    assert x.grad.tolist() == [2, 2, 2]
    assert gradient.tolist() == [2, 2, 2] if all(fresh) else [1, 1, 1]


def test_many_small_linears_are_most_of_a_module():
    root = nn.ModuleDict({str(k): nn.Linear(8, 8) for k in range(80)})
    units, x = dict(root.named_children()), torch.rand(3, 8)
    with record_calls(units, units) as calls:
        for unit in units.values():
            x = unit(x)
    assert all(plan.num_sharded for plan in ModelSearch(root, units, calls, {}, 2).plans().values())


@pytest.mark.parametrize(("width", "is_full"), [(64, True), (8, False)])
def test_isolated_small_linear_stays_full(width, is_full):
    block = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    root = nn.ModuleDict({"block": block, "head": nn.Linear(width, 4)})
    units = dict(root.named_children())
    with record_calls(units, units) as calls:
        root["head"](root["block"](torch.rand(3, width)))
    plans = ModelSearch(root, units, calls, {}, 2).plans()
    assert plans["block"].num_sharded == 3
    assert (plans["head"].placements["weight"] == Replicated()) is is_full
    assert plans["head"].replicated_reasons.get("weight") == (
        "less than 1/64 of the module, and alone" if is_full else None
    )


def test_planning_does_not_read_computed_weights():
    layers = [parametrizations.spectral_norm(nn.Linear(8, 8)) for _ in range(2)]
    root, x = nn.ModuleDict({str(k): layer for k, layer in enumerate(layers)}), torch.rand(3, 8)
    units = dict(root.named_children())
    with record_calls(units, units) as calls:
        for unit in units.values():
            x = unit(x)
    before = {name: buffer.clone() for name, buffer in root.named_buffers()}
    ModelSearch(root, units, calls, {}, 2).plans()
    assert before and all(torch.equal(buffer, before[name]) for name, buffer in root.named_buffers())
