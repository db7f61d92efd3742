"""Column-parallel products by which a value enters a region: gradients are those of entering first."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_hybrid.tensor.collectives import Arriving, Ranks
from lightning_hybrid.tensor.runtime.linears import RegionInputs
from lightning_hybrid.tensor.runtime.products import Product


class Doubling(Ranks):
    """Two ranks with the same gradients."""

    rank, size = 0, 2

    def __init__(self, overlaps):
        self.overlaps, self.done = overlaps, []

    def all_reduce(self, tensor):
        self.done.append("sum")
        tensor.mul_(2)

    def start_all_reduce(self, tensor):
        self.done.append("launch")
        tensor.mul_(2)
        return Arriving(tensor)


def products(dtype, bias, transposed):
    torch.manual_seed(1)
    modules = [nn.Linear(6, 4, bias=bias, dtype=dtype) for _ in range(3)]
    if transposed:
        for module in modules:
            module.weight = nn.Parameter(module.weight.detach().t().contiguous())
    return modules, [Product(module, SimpleNamespace(out_dim=1 if transposed else 0)) for module in modules]


def gradients(overlaps, *, readers=3, dtype=torch.float64, bias=True, transposed=False, autocast=False, unused=()):
    modules, each = products(dtype, bias, transposed)
    ranks = Doubling(overlaps)
    inputs = RegionInputs(ranks, ranks, gathers=False)
    x = torch.randn(2, 5, 6, dtype=dtype, requires_grad=True)
    above = x * 2
    with inputs, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        outs = [inputs.multiply(product, ranks, above) for product in each[:readers]]
    sum(out.float().sin().sum() for k, out in enumerate(outs) if k not in unused).backward()
    parameters = [p for module in modules[:readers] for p in module.parameters()]
    return [x.grad, *(p.grad for p in parameters)], ranks.done


CASES = {
    "one reader": {"readers": 1},
    "three readers": {},
    "no bias": {"bias": False},
    "transposed": {"transposed": True},
    "bfloat16": {"dtype": torch.bfloat16},
    "autocast": {"dtype": torch.float32, "autocast": True},
    "the first output is not used": {"unused": (0,)},
    "the others are not used": {"unused": (1, 2)},
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_bitwise_those_of_entering_first(name):
    found, launched = gradients(True, **CASES[name])
    wanted, summed = gradients(False, **CASES[name])
    assert (launched, summed) == (["launch"], ["sum"])
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) is (other is None)
        assert one is None or torch.equal(one, other)


def test_gradients_can_be_differentiated():
    _, [product, *_] = products(torch.float64, True, False)
    ranks, x = Doubling(True), torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)

    def penalty(overlaps):
        weight = product._module.weight
        weight.grad = None
        ranks.overlaps = overlaps
        inputs = RegionInputs(ranks, ranks, gathers=False)
        with inputs:
            out = inputs.multiply(product, ranks, x)
        [gradient] = torch.autograd.grad(out.sin().sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), (x, weight))

    for one, other in zip(penalty(True), penalty(False), strict=True):
        torch.testing.assert_close(one, other)
