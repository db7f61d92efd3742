"""Containers are flattened and rebuilt, arguments are copied, and repeated layers are found."""

import collections
import dataclasses
from typing import NamedTuple

import pytest
import torch
from torch import nn

from lightning_hybrid.step.objects.modules import copied, find_layers, may_change
from lightning_hybrid.step.objects.pytree import flatten, flatten_call, map_leaves, rebuild_call, unflatten


class Pair(NamedTuple):
    left: object
    right: object


@dataclasses.dataclass
class Record:
    x: object
    y: object = None


CONTAINERS = [
    (1, [2, 3]),
    {"a": 1, "b": (2, 3)},
    collections.OrderedDict(b=1, a=2),
    Pair(1, [2]),
    Record(1, Record(2)),
    slice(1, 5, 2),
    collections.UserDict({"x": 1}),
]


@pytest.mark.parametrize("value", CONTAINERS, ids=lambda value: type(value).__name__)
def test_flatten_round_trip(value):
    leaves, spec = flatten(value)
    assert all(type(leaf) in (int, type(None)) for leaf in leaves)
    rebuilt = unflatten(leaves, spec)
    assert rebuilt == value and type(rebuilt) is type(value)


def test_mapping_leaves_keeps_the_original():
    value = Record(1, {"a": [2, 3]})
    assert map_leaves(lambda leaf: leaf * 10, value) == Record(10, {"a": [20, 30]})
    assert value == Record(1, {"a": [2, 3]})


@pytest.mark.parametrize(("args", "plain"), [((1, "a"), True), ((1, [2, 3]), False)])
def test_call_arguments_are_replaced(args, plain):
    leaves, is_plain = flatten_call(args, {"k": 4})
    assert is_plain is plain
    changed = [leaf * 2 if isinstance(leaf, int) else leaf for leaf in leaves]
    expected = (2, "a") if plain else (2, [4, 6])
    assert rebuild_call(changed, args, {"k": 4}, plain) == (expected, {"k": 8})


def test_deep_copy_copies_tensors_with_a_graph():
    layer = nn.Linear(2, 2)
    hidden = layer(torch.ones(1, 2))
    cache = {"keys": [hidden, hidden], "layer": layer}
    again = copied(cache, modules=False)
    assert again["keys"][0] is again["keys"][1] and again["keys"][0] is not hidden
    assert torch.equal(again["keys"][0], hidden) and not again["keys"][0].requires_grad
    assert again["layer"] is layer and copied(cache)["layer"] is not layer


def test_mutable_call_arguments():
    assert not may_change((1, "a", torch.ones(1), nn.Linear(1, 1)))
    assert may_change({"keys": 1}) and may_change((1, [2]))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)) for _ in range(3))
        self.head = nn.Linear(2, 1)
        self.activation = nn.Tanh()


def test_list_members_are_the_layers():
    model = Stack()
    found = find_layers({"net": model, "last": nn.Linear(2, 2)})
    assert list(found) == ["net.blocks.0", "net.blocks.1", "net.blocks.2", "net.head", "last"]
    assert found["net.blocks.1"] is model.blocks[1]


def test_layer_used_twice_is_one():
    model = Stack()
    model.blocks[2] = model.blocks[0]
    assert list(find_layers({"net": model})) == ["net.blocks.0", "net.blocks.1", "net.head"]
