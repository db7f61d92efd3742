"""Grouped products in float64 are those of torch's kernel, which has none for float64."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import grouped_mm

from lightning_hybrid.equivalence.deterministic import DeterministicMode, grouped_product

OFFSETS = torch.tensor([3, 3, 8], dtype=torch.int32)
SHAPES = [((8, 16), (3, 16, 4), OFFSETS), ((3, 4, 16), (3, 16, 8), None), ((4, 8), (8, 16), OFFSETS),
          ((3, 4, 16), (16, 8), OFFSETS)]  # fmt: skip


@pytest.mark.parametrize(("first", "second", "offsets"), SHAPES, ids=str)
def test_products_and_gradients(first, second, offsets):
    values = [torch.randn(shape, requires_grad=True) for shape in (first, second)]
    wide = [value.detach().double().requires_grad_() for value in values]
    expected = grouped_mm(*values, offs=offsets)
    with DeterministicMode(torch.float64):
        found = grouped_mm(*wide, offs=offsets)
    assert found.dtype is torch.float64
    torch.testing.assert_close(found.float(), expected)
    weights = torch.randn(expected.shape)
    gradients = torch.autograd.grad((expected * weights).sum(), values)
    torch.testing.assert_close([g.float() for g in torch.autograd.grad((found * weights).sum(), wide)], [*gradients])


@pytest.mark.parametrize(("first", "second", "offsets"), SHAPES, ids=str)
def test_shapes_of_fake_tensors(first, second, offsets):
    expected = grouped_mm(torch.zeros(first), torch.zeros(second), offs=offsets).shape
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert grouped_product(torch.empty(first), torch.empty(second), offsets).shape == expected


def test_rows_after_the_last_group_are_zero():
    found = grouped_product(torch.ones(10, 4), torch.ones(3, 4, 4), OFFSETS)
    assert found.sum(1).tolist() == [16.0] * 8 + [0.0] * 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rows_are_multiples_of_16_bytes_as_for_the_kernel(dtype):
    first, second = torch.ones(8, 5, dtype=dtype), torch.ones(3, 5, 4, dtype=dtype)
    with DeterministicMode(dtype), pytest.raises(RuntimeError, match="multiple of 16 bytes"):
        grouped_mm(first, second, offs=OFFSETS)
