"""Grouped matrix products without data have the shapes of the real kernel, in its dtypes."""

import pytest
import torch
from torch.nn.functional import grouped_mm

from lightning_hybrid.step.standins.kernels import GroupedProductShapes

OFFSETS = torch.tensor([3, 3, 8], dtype=torch.int32)
SHAPES = [((8, 16), (3, 16, 8), OFFSETS), ((3, 4, 16), (3, 16, 8), None), ((4, 8), (8, 16), OFFSETS),
          ((3, 4, 16), (16, 8), OFFSETS)]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("first", "second", "offsets"), SHAPES, ids=str)
def test_shapes_of_products_and_gradients(first, second, offsets, dtype):
    real = [torch.zeros(shape, dtype=dtype, requires_grad=True) for shape in (first, second)]
    expected = grouped_mm(*real, offs=offsets)
    meta = [torch.zeros(shape, dtype=dtype, device="meta", requires_grad=True) for shape in (first, second)]
    with GroupedProductShapes():
        found = grouped_mm(*meta, offs=None if offsets is None else offsets.to("meta"))
        gradients = torch.autograd.grad(found.sum(), meta)
    assert (found.shape, found.dtype, found.device.type) == (expected.shape, dtype, "meta")
    assert [g.shape for g in gradients] == [value.shape for value in real]


def test_wrong_shapes_are_refused():
    with GroupedProductShapes(), pytest.raises(RuntimeError):
        grouped_mm(torch.zeros(8, 16, device="meta"), torch.zeros(3, 8, 4, device="meta"), offs=OFFSETS.to("meta"))
