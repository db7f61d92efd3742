"""Changes to modules are undone in place, and tensors in attributes are found and set by their paths."""

import random

import pytest
import torch
from torch import nn

from lightning_hybrid.step.module_state.attributes import attribute_tensors, look_up, put
from lightning_hybrid.step.module_state.snapshots import (
    ArgumentSnapshot,
    AttributePath,
    ModuleSnapshot,
    TensorSnapshot,
    reachable_leaves,
)


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.outputs, self.totals, self.count = [1], {"a": [torch.zeros(2)]}, 0
        self.generator = random.Random(3)
        self.register_buffer("mask", torch.zeros(2))

    def change(self):
        self.outputs.append(2)
        self.totals["b"] = 1
        self.count += 1
        self.new = "attribute"
        self.generator.random()
        self.mask.add_(1)
        self.norm(torch.randn(4, 2))


def test_modules_are_restored_in_place():
    module = Stateful()
    outputs, totals, mask = module.outputs, module.totals, module.mask
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    drawn = random.Random(3).random()
    state = ModuleSnapshot(module)
    module.change()
    assert not state.has_unchanged(mask)
    state.restore()
    assert module.outputs is outputs and outputs == [1] and module.totals is totals and list(totals) == ["a"]
    assert module.count == 0 and not hasattr(module, "new") and module.generator.random() == drawn
    assert module.mask is mask
    for name, buffer in module.named_buffers():
        assert torch.equal(buffer, buffers[name]), name


def test_buffers_may_be_excluded_from_restoring():
    module = Stateful()
    state = ModuleSnapshot(module, buffers=False)
    module.change()
    state.restore()
    assert module.count == 0 and torch.equal(module.mask, torch.ones(2))


def test_hooks_on_excluded_modules_are_removed():
    module = Stateful()
    module.norm.register_forward_hook(print)
    state = ModuleSnapshot(module, without=[module.norm], unhooked=[module.norm])
    module.norm.register_forward_hook(repr)
    state.restore()
    assert list(module.norm._forward_hooks.values()) == [print]


def test_tensor_is_restored_into_its_storage():
    tensor = torch.ones(3)
    address = tensor.data_ptr()
    snapshot = TensorSnapshot(tensor)
    assert snapshot.is_here()
    tensor.data = torch.zeros(3)
    assert not snapshot.is_here()
    snapshot.restore()
    assert tensor.data_ptr() == address and torch.equal(tensor, torch.ones(3))


def test_containers_in_arguments_are_restored():
    cache, names = {"keys": [1]}, []
    state = ArgumentSnapshot([cache, names, 3, torch.ones(1)])
    cache["keys"].append(2)
    cache["values"] = 1
    names.append("x")
    state.restore()
    assert cache == {"keys": [1]} and names == []


def test_attribute_tensors_by_path():
    module = Stateful()
    places = dict(attribute_tensors(module))
    inner = AttributePath("", "totals", ("a", 0))
    assert str(inner) == "self.totals['a'][0]" and places[inner] is module.totals["a"][0]
    assert places[AttributePath("norm", "running_mean", ())] is module.norm.running_mean
    new = torch.full((2,), 5.0)
    put(module, [inner], [new])
    assert module.totals["a"][0] is new and look_up(module, [inner]) == [new]


@pytest.mark.parametrize("path", [("b",), ("a", 3), ("a", 0, "x")])
def test_path_without_a_value_gives_none(path):
    assert look_up(Stateful(), [AttributePath("", "totals", path)]) == [None]


def test_leaves_of_equal_sets_have_equal_paths():
    """In whatever order they were filled, with 8 and 16, which share a place in their tables."""
    one, other = nn.Module(), nn.Module()
    one.numbers, other.numbers = {8, 16}, {16, 8}
    assert list(one.numbers) != list(other.numbers)
    assert dict(reachable_leaves(one)) == dict(reachable_leaves(other))
