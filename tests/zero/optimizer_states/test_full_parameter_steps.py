"""Optimizers that need all elements of a parameter: parity with one process, owners, bytes and messages."""

import pytest

from harness.fits import Run, check
from models.full_parameter_optimizers import MODULES

LAYOUTS = {
    "tp2": {"tp": 2},
    "zero3": {"dp": 2, "strategy": {"zero_stage": 3}},
    "pp2": {"pp": 2},
    "zero1": {"dp": 2, "strategy": {"zero_stage": 1}},
    "zero2": {"dp": 2, "strategy": {"zero_stage": 2}},
    "tp2 x pp2 x dp2": {"tp": 2, "pp": 2, "dp": 2},
    "tp2 x pp2 x zero3": {"tp": 2, "pp": 2, "dp": 2, "strategy": {"zero_stage": 3}},
}
FAST = {("muon", "tp2"), ("adafactor", "zero3"), ("lamb", "tp2"), ("lars", "zero2")}


@pytest.mark.parametrize(
    ("optimizer", "layout"),
    [
        pytest.param(optimizer, layout, marks=() if (optimizer, layout) in FAST else pytest.mark.slow)
        for optimizer in MODULES
        for layout in LAYOUTS
    ],
)
def test_parity(worlds, optimizer, layout):
    check(worlds, Run(MODULES[optimizer], num_batches=4, **LAYOUTS[layout]), timeout=300)
