"""Exact codes of few bits: signs, masks, tensors of two values, and integers of a small range (Gist, Jain et al. 2018).

A tensor of two values (a dropout mask, scaled or not) takes one bit per value. Integers (the indices of max-pooling)
take as many bytes as their range needs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_SAMPLE = 64  # a tensor with more than two values has them at its beginning


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Packs codes below 2^bits, uint8 of shape (n,), into shape (ceil(n * bits / 8),)."""
    if bits == 8:
        return codes
    each = 8 // bits
    if missing := -len(codes) % each:
        codes = torch.cat([codes, codes.new_zeros(missing)])
    columns = codes.view(-1, each)
    packed = columns[:, 0].clone()
    for place in range(1, each):
        packed |= columns[:, place] << (place * bits)
    return packed


def unpack_codes(packed: Tensor, bits: int, length: int) -> Tensor:
    """Returns the codes, uint8 of shape (length,), from the result of ``pack_codes``."""
    if bits == 8:
        return packed[:length]
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return ((packed[:, None] >> shifts) & (2**bits - 1)).view(-1)[:length]


class TwoValues(NamedTuple):
    """A tensor that holds at most two values.

    Attributes:
        packed: One bit per value, uint8.
        values: The two values, of shape (2,).
        length: The number of values.
    """

    packed: Tensor
    values: Tensor
    length: int

    def decode(self) -> Tensor:
        """Returns the tensor, of shape (length,)."""
        return self.values[unpack_codes(self.packed, 1, self.length).to(torch.int32)]


def pack_two_values(flat: Tensor) -> TwoValues | None:
    """Packs a tensor of shape (n,) if it holds at most two values; None if it holds more, or NaN."""
    if flat.dtype == torch.bool:
        values = torch.tensor([False, True], device=flat.device)
        return TwoValues(pack_codes(flat.view(torch.uint8), 1), values, len(flat))
    for part in (flat[:_SAMPLE], flat):
        low, high = part.aminmax()
        is_high = part == high
        if not bool((is_high | (part == low)).all()):
            return None
    if bool(low == 0) and flat.is_floating_point() and bool(torch.signbit(flat).any()):
        return None  # a zero of either sign
    return TwoValues(pack_codes(is_high.view(torch.uint8), 1), torch.stack([low, high]), len(flat))


def pack_integers(flat: Tensor) -> tuple[Tensor, Tensor] | None:
    """Packs integers of shape (n,): their distances from the smallest, in a smaller type, and the smallest.

    Returns None if their range needs their own type.
    """
    if flat.dtype == torch.uint8 or flat.is_floating_point() or flat.is_complex() or not len(flat):
        return None
    low, high = (int(value) for value in flat.aminmax())
    for dtype, limit in ((torch.uint8, 2**8), (torch.int16, 2**15), (torch.int32, 2**31)):
        if high - low < limit and dtype.itemsize < flat.dtype.itemsize:
            return (flat - low).to(dtype), flat.new_tensor(low)
    return None


def unpack_integers(codes: Tensor, low: Tensor) -> Tensor:
    """Returns the integers, of shape (n,), from the results of ``pack_integers``."""
    return codes.to(low.dtype) + low
