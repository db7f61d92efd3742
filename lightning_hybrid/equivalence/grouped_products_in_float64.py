"""Grouped matrix products in float64, for which torch has no kernel: one product after the other."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_ALIGNED = 4


def grouped_product(first: Tensor, second: Tensor, offsets: Tensor | None) -> Tensor:
    """Computes ``torch.nn.functional.grouped_mm``; of fake tensors, a tensor of the right shape.

    Args:
        first: Of shape [G, M, K], or [M, K] whose rows (columns if ``second`` has two dims as well) are in groups.
        second: Of shape [G, K, N], or [K, N] whose columns (rows) are in groups.
        offsets: Of shape [G], the end of each group; what comes after the last one is 0 in the result.

    Raises:
        RuntimeError: Rows of an operand are no multiples of 16 bytes, which torch refuses too.
    """
    for each in (first, second):
        # As torch's kernels, which read 16 bytes at once, of numbers of at most 4 bytes.
        row, column = each.stride()[-2:]
        if (row if column == 1 else column) % _ALIGNED:
            raise RuntimeError("strides should be multiple of 16 bytes")
    dims = first.dim(), second.dim()
    if dims == (3, 3) or offsets is None:
        return torch.bmm(first, second)
    if any(isinstance(each, FakeTensor) for each in (first, second, offsets)):
        product = (first if dims[0] == 2 else first[0]) @ (second if dims[1] == 2 else second[0])
        return product.expand(*offsets.shape, *product.shape) if dims == (2, 2) else product
    sizes = [stop - start for start, stop in itertools.pairwise([0, *offsets.tolist()])]
    if dims == (2, 2):
        columns, rows = first[:, : sum(sizes)].split(sizes, 1), second[: sum(sizes)].split(sizes)
        return torch.stack([one @ other for one, other in zip(columns, rows, strict=True)])
    if dims == (2, 3):
        rest = first.shape[0] - sum(sizes)
        *groups, after = first.split([*sizes, rest])
        products = [rows @ weight for rows, weight in zip(groups, second.unbind(), strict=True) if len(rows)]
        return torch.cat([*products, after.new_zeros(rest, second.shape[-1])])
    rest = second.shape[-1] - sum(sizes)
    *groups, after = second.split([*sizes, rest], 1)
    products = [weight @ columns for weight, columns in zip(first.unbind(), groups, strict=True)]
    return torch.cat([*products, after.new_zeros(first.shape[1], rest)], 1)
