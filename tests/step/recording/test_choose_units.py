"""The modules that no cut enters."""

import pytest
import torch
from torch import nn

from harness.one_process_pipeline import assert_same_gradients, pipeline, record_and_cut, reference
from lightning_hybrid.errors import ControlFlowError
from lightning_hybrid.step.recording.units import UnitChoice, choose_units
from lightning_hybrid.step.standins.tensors import FULL_SHAPE, drop
from models.cases import batch_of
from models.hand_written import WIDTH, Layers


def layers():
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)) for _ in range(2)))


def test_each_layer_is_one_unit():
    assert list(choose_units(layers(), 2)) == ["0", "1"]


def test_units_do_not_depend_on_local_shards():
    root = layers()
    for parameter in root[0].parameters():
        parameter.__dict__[FULL_SHAPE] = parameter.shape
        parameter.data = torch.zeros_like(parameter)[: len(parameter) // 2]
    for parameter in root[1].parameters():
        drop(parameter)
    assert list(choose_units(root, 2)) == ["0", "1"]


class Branching(nn.Module):
    """Its inside cannot be traced; as one unit it can."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.first(x)
        return self.second(2 * x if x.sum() > 0 else x)


@pytest.mark.parametrize("count", [3, 5])
def test_unopenable_unit_is_one_node_for_balance(count):
    module, batch = Layers(), batch_of(Layers.kind, range(4))
    module.layers = nn.ModuleList(Branching() for _ in range(count))
    module.double()
    outcome = pipeline(module, lambda: module.loss(batch), 2)
    assert outcome.units[0] == [f"layers.{index}" for index in range(len(outcome.units[0]))]
    assert all(outcome.units)
    assert_same_gradients(outcome.grads, reference(module, lambda: module.loss(batch)).grads)


def test_uncuttable_unit_says_why():
    module, batch = Layers(), batch_of(Layers.kind, range(4))
    module.layers = nn.ModuleList([Branching()])
    module.double()
    with pytest.raises(ControlFlowError, match=r"test_choose_units\.py:\d+: the step branches on a value"):
        record_and_cut(module, lambda: module.loss(batch), 3)


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(8, 4), nn.ModuleList(nn.Linear(8, 8) for _ in range(4))


def test_a_mixture_is_one_unit_where_ranks_share_its_experts():
    root = nn.Sequential(nn.Linear(8, 8), Mixture())
    assert list(UnitChoice(root, 2, closes_mixtures=True).choose()) == ["0", "1"]
    assert "1.experts.0" in UnitChoice(root, 2).choose()
    layers = nn.ModuleDict({"first": nn.Linear(8, 8), "stack": nn.ModuleList(nn.Linear(8, 8) for _ in range(4))})
    assert "1.stack.3" in UnitChoice(nn.Sequential(nn.Linear(8, 8), layers), 2, closes_mixtures=True).choose()
