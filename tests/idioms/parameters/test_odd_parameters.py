"""Parameters of other dtypes than floating point, single numbers, and parameters without elements."""

import pytest
import torch
from torch import nn

from harness.verification import check
from lightning_hybrid.verify import Layout
from models.regression import FEATURES, Regression


class Odd(Regression):
    """Each layer scales its input by a function of a parameter of its own."""

    made = used = None

    def __init__(self):
        super().__init__()
        self.odd = nn.ParameterList(self.made(number) for number in range(4))

    def forward(self, x):
        for layer, odd in zip(self.layers, self.odd, strict=True):
            x = layer(x) * self.used(odd)
        return self.head(x)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def odd(name, make, use):
    return type(name, (Odd,), {"made": lambda self, n: make(n), "used": lambda self, p: use(p), "__module__": __name__})


def frozen(tensor):
    return nn.Parameter(tensor, requires_grad=False)


Integers = odd("Integers", lambda n: frozen(torch.arange(FEATURES) + n), lambda p: p / 5)
Booleans = odd("Booleans", lambda n: frozen(torch.arange(FEATURES) != n), lambda p: p)
Bytes = odd("Bytes", lambda n: frozen(torch.arange(2 * FEATURES).view(2, -1).byte()), lambda p: p.sum(0) / 9)
OneInteger = odd("OneInteger", lambda n: frozen(torch.tensor(n + 1)), lambda p: p)
OneNumber = odd("OneNumber", lambda n: nn.Parameter(torch.tensor(1.0 + n)), lambda p: p)
NoElements = odd("NoElements", lambda n: nn.Parameter(torch.zeros(0, FEATURES)), lambda p: 1 + p.sum())
Complex = odd(
    "Complex", lambda n: nn.Parameter(torch.full((FEATURES,), 1 + 1j * n, dtype=torch.complex128)), lambda p: p.abs()
)
MODULES = [Integers, Booleans, Bytes, OneInteger, OneNumber, NoElements, Complex]

LAYOUTS = [
    Layout("one device", devices=1, strategy={}),
    Layout("dp2", devices=2, strategy={}),
    Layout("pp2", devices=2, strategy={"pipeline_parallel_size": 2}),
    Layout("tp2", devices=2, strategy={"tensor_parallel_size": 2}),
    Layout("zero1", devices=2, strategy={"zero_stage": 1}),
    Layout("zero3", devices=2, strategy={"zero_stage": 3}),
    Layout("zero3 by layer", devices=2, strategy={"zero_stage": 3, "reshard_after_forward": True, "recompute": "full"}),
    Layout("pp2 x zero3", devices=4, strategy={"zero_stage": 3, "pipeline_parallel_size": 2}),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("module", MODULES)
def test_odd_parameters(worlds, module, layout):
    report = check(worlds, module, layout)
    assert report.outcome == "same", str(report)
