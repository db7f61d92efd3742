"""Products that communicate: results and gradients are those of their parts.

A value that enters a region by a product has the gradients of one that enters first.
"""

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


def products(dtype, bias, transposed, width=6):
    torch.manual_seed(1)
    modules = [nn.Linear(width, 4, bias=bias, dtype=dtype) for _ in range(3)]
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

WIDE = {"dtype": torch.float32, "transposed": True, "width": 256}  # its sums have other last bits in other orders


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_bitwise_those_of_entering_first(name):
    found, launched = gradients(True, **CASES[name])
    wanted, summed = gradients(False, **CASES[name])
    assert (launched, summed) == (["launch"], ["sum"])
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) is (other is None)
        assert one is None or torch.equal(one, other)


def twice(out, x, module):
    """The gradients of a penalty on those of a function of the output."""
    every = x, module.weight, module.bias
    gradients = torch.autograd.grad(out.sin().sum(), every, create_graph=True)
    return torch.autograd.grad(sum(gradient.square().sum() for gradient in gradients), every)


def test_gradients_can_be_differentiated():
    [module, *_], [product, *_] = products(torch.float64, True, False)
    ranks, x = Doubling(True), torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)

    def penalty(overlaps):
        ranks.overlaps = overlaps
        inputs = RegionInputs(ranks, ranks, gathers=False)
        with inputs:
            out = inputs.multiply(product, ranks, x)
        return twice(out, x, module)

    for one, other in zip(penalty(True), penalty(False), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("case", ["no bias", "transposed", "bfloat16", "autocast", "one reader", "wide"])
def test_a_row_in_one_function_computes_what_its_parts_do(case, monkeypatch):
    options = {"dtype": torch.float64, "bias": True, "transposed": False} | CASES.get(case, WIDE)
    autocast = options.pop("autocast", False)
    options.pop("readers", None)

    def run():
        [module, *_], [product, *_] = products(**options)
        x = torch.randn(2, 5, module.weight.numel() // 4, dtype=options["dtype"], requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = product.leave(Doubling(False), x * 2)
        out.float().sin().sum().backward()
        return out, x.grad, *(p.grad for p in module.parameters())

    found = run()
    monkeypatch.setattr(Product, "_in_one", lambda *_: False)
    assert all(torch.equal(one, other) for one, other in zip(found, run(), strict=True))


def test_gradients_of_a_row_can_be_differentiated(monkeypatch):
    [module, *_], [product, *_] = products(torch.float64, True, False)
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)

    def penalty():
        return twice(product.leave(Doubling(False), x), x, module)

    found = penalty()
    monkeypatch.setattr(Product, "_in_one", lambda *_: False)
    for one, other in zip(found, penalty(), strict=True):
        torch.testing.assert_close(one, other)


def test_a_tensor_that_a_transform_has_left_behind_keeps_its_gradient():
    _, [product, *_] = products(torch.float64, True, False)
    x, left = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True), []

    def function(y):
        left.append(y * x)
        return left[0].sum()

    torch.func.grad(function)(torch.ones_like(x))
    [gradient] = torch.autograd.grad(product.leave(Doubling(False), left[0]).sum(), x)
    [wanted] = torch.autograd.grad(product.leave(Doubling(False), x * 1).sum(), x)
    torch.testing.assert_close(gradient, wanted)
