"""Quantization of a tensor in groups, with stochastic rounding (ActNN, Chen et al. 2021, section 4.1).

Each group of 256 neighbours in memory has its minimum and maximum, and 2^bits levels between them. A value is rounded
up with the probability of its distance from the level below, so that its expectation is the value itself, and that of a
gradient that is linear in it is the exact gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from lightning_hybrid.memory.saved_activations.exact_bit_packing import pack_codes, unpack_codes

GROUP = 256
BITS = (1, 2, 4, 8)


def quantize(flat: Tensor, bits: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Quantizes a tensor; a group with a value that is not finite becomes NaN.

    Args:
        flat: Floating point, of shape (n,).
        bits: Of a value: 1, 2, 4 or 8.
        generator: Draws the rounding; on the tensor's device.

    Returns:
        The packed codes, uint8 of one dimension; for each group its minimum and the distance of two levels, float32 of
        shape (2 * ceil(n / 256),).
    """
    values = flat.to(torch.float32)
    if missing := -len(flat) % GROUP:
        values = functional.pad(values[None], (0, missing), mode="replicate")[0]
    groups = values.view(-1, GROUP)
    low, high = torch.aminmax(groups, dim=1, keepdim=True)
    step = (high - low) / (2**bits - 1)
    levels = torch.rand(groups.shape, generator=generator, device=flat.device)
    levels.add_((groups - low).mul_(torch.where(step == 0, 0, 1 / step))).floor_().clamp_(0, 2**bits - 1)
    return pack_codes(levels.to(torch.uint8).view(-1), bits), torch.cat([low, step], dim=1).view(-1)


def dequantize(codes: Tensor, scales: Tensor, bits: int, length: int, dtype: torch.dtype) -> Tensor:
    """Returns the values of shape (length,), from the results of ``quantize``."""
    pairs = scales.view(-1, 2)
    levels = unpack_codes(codes, bits, len(pairs) * GROUP).view(-1, GROUP)
    values = torch.addcmul(pairs[:, :1], levels.to(torch.float32), pairs[:, 1:])
    return values.view(-1)[:length].to(dtype)
