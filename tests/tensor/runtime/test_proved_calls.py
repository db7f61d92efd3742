"""Trials of a layer in a run leave nothing behind."""

import gc
import weakref

import torch
from torch import nn

from lightning_hybrid.tensor.runtime.check_forward_was_proved import ProvedCalls

MADE = []


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
    calls = ProvedCalls(layer, frozenset(), note=lambda _: None, agree=lambda seen: seen)
    assert calls.first_deviation(layer.forward, layer.forward, (torch.ones(2, 3, requires_grad=True),), {}) == ""
    gc.collect()
    assert MADE and all(made() is None for made in MADE)
