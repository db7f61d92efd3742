"""The module walk of a step equals torch's own."""

import torch
from torch import nn

from lightning_hybrid.step.objects.modules import modules_in, parameters_of
from models.hand_written import EncoderDecoder


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.own = nn.Parameter(torch.zeros(2))
        self.inner = nn.ModuleDict({"again": self.first, "deep": nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU())})
        self.nothing = None
        self.register_module("no_module", None)
        self.register_parameter("no_parameter", None)
        self.inner["deep"][0].tied = self.own
        self.last = self.inner["deep"][1]


def test_same_order_as_torch_without_duplicates():
    for root in (Nested(), nn.Sequential(), nn.Linear(1, 1), EncoderDecoder()):
        assert modules_in(root) == list(root.named_modules())
        found, expected = parameters_of(modules_in(root)), list(root.named_parameters())
        assert [(name, id(parameter)) for name, parameter in found] == [(name, id(each)) for name, each in expected]
