"""The modules that a cut never enters."""

import torch
from torch import nn

from lightning_hybrid.step.absent import WHOLE_SHAPE, drop
from lightning_hybrid.step.units import choose_units


def layers():
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)) for _ in range(2)))


def test_each_layer_is_one_unit():
    assert list(choose_units(layers(), 2)) == ["0", "1"]


def test_a_rank_that_holds_parts_of_some_layers_and_nothing_of_others_chooses_the_same():
    root = layers()
    for parameter in root[0].parameters():
        parameter.__dict__[WHOLE_SHAPE] = parameter.shape
        parameter.data = torch.zeros_like(parameter)[: len(parameter) // 2]
    for parameter in root[1].parameters():
        drop(parameter)
    assert list(choose_units(root, 2)) == ["0", "1"]
