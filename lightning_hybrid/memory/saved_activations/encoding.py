"""The encoding of a saved tensor: exact bits where the backward needs no more, quantized, or unchanged.

saved tensor                                          encoding
result of ReLU, saved by ReLU                         one bit: its backward needs the sign
dropout and other masks, of two values                one bit per value, exact
integers: indices of max-pooling, tokens              distances from the smallest, exact
result of log-softmax or logsumexp, saved by it       none: the backward takes its exponential
inputs of attention and logsumexp                     quantized to 8 bits at least, for the same reason
statistics, data: floating point, outside the graph   none
other results of the graph: activations               quantized in groups

Exact codes are those of Gist (Jain et al. 2018): a tensor of two values (a dropout mask, scaled or not) takes one bit
per value; integers take as many bytes as their range needs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_SAMPLE = 64  # a tensor with more than two values has them at its beginning
GROUP = 256
BITS = (1, 2, 4, 8)
Role: TypeAlias = Literal["sign", "exact", "value"]
_QUANTIZED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_EXPONENTIALS = ("scaled_dot_product_attention", "logsumexp")
_BY_SIGN = "ReluBackward0"
_EXACT = ("LogSoftmaxBackward0", "LogsumexpBackward0")


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


class Encoded(NamedTuple):
    """An encoded tensor: its parts, and the function that makes it, of shape (n,), from them."""

    parts: tuple[Tensor, ...]
    decode: Callable[..., Tensor]

    @property
    def is_same(self) -> bool:
        """Whether the tensor is as it was."""
        return self.decode is _same


def as_it_is(flat: Tensor) -> Encoded:
    """Encodes a tensor of shape (n,) as itself."""
    return Encoded((flat,), _same)


def _same(flat: Tensor) -> Tensor:
    return flat


def pack_two_values(flat: Tensor) -> Encoded | None:
    """Packs a tensor of shape (n,) if it holds at most two values; None if it holds more, or NaN."""
    if flat.dtype == torch.bool:
        is_high, values = flat, torch.tensor([False, True], device=flat.device)
    else:
        for part in (flat[:_SAMPLE], flat):
            low, high = part.aminmax()
            is_high = part == high
            if not bool((is_high | (part == low)).all()):
                return None
        if bool(low == 0) and flat.is_floating_point() and bool(torch.signbit(flat).any()):
            return None  # a zero of either sign
        values = torch.stack([low, high])
    return Encoded((pack_codes(is_high.view(torch.uint8), 1), values), partial(_two_values, length=len(flat)))


def _two_values(packed: Tensor, values: Tensor, length: int) -> Tensor:
    return values[unpack_codes(packed, 1, length).to(torch.int32)]


def pack_integers(flat: Tensor) -> Encoded | None:
    """Packs integers of shape (n,) as distances from the smallest; None if their range needs their own type."""
    if flat.dtype == torch.uint8 or flat.is_floating_point() or flat.is_complex() or not len(flat):
        return None
    low, high = (int(value) for value in flat.aminmax())
    for dtype, limit in ((torch.uint8, 2**8), (torch.int16, 2**15), (torch.int32, 2**31)):
        if high - low < limit and dtype.itemsize < flat.dtype.itemsize:
            return Encoded(((flat - low).to(dtype), flat.new_tensor(low)), _integers)
    return None


def _integers(codes: Tensor, low: Tensor) -> Tensor:
    return codes.to(low.dtype) + low


# Quantization of a tensor in groups, with stochastic rounding (ActNN, Chen et al. 2021, section 4.1).
# Each group of 256 neighbours in memory has its minimum and maximum, and 2^bits levels between them. A value is rounded
# up with the probability of its distance from the level below, so that its expectation is the value itself, and that of
# a gradient that is linear in it is the exact gradient.


def quantize(flat: Tensor, bits: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Quantizes floating-point numbers of shape (n,); a group with a value that is not finite becomes NaN.

    Returns the packed codes, uint8 of one dimension; for each group its minimum and the distance of two levels, float32
    of shape (2 * ceil(n / 256),).
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


class ExponentialWatch(TorchFunctionMode):
    """Marks the functions whose backward takes the exponential of values that they save.

    Attributes:
        is_inside: Whether one of them runs: its tensors need 8 bits.
    """

    is_inside = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs a function of torch."""
        before, self.is_inside = self.is_inside, getattr(func, "__name__", "") in _EXPONENTIALS
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.is_inside = before


def role_of(tensor: Tensor) -> Role:
    """Returns what the backward needs of a tensor of any shape, which autograd saves now."""
    node = tensor.grad_fn
    # A node saves its result before there is any other node; those that read it come later.
    if node is None or torch.autograd._get_sequence_nr() != node._sequence_nr() + 1:
        return "value"
    name = node.name()
    return "sign" if name == _BY_SIGN else "exact" if name in _EXACT else "value"


def encode(flat: Tensor, role: Role, *, in_graph: bool, bits: int, generator: Callable[[], torch.Generator]) -> Encoded:
    """Encodes a tensor of shape (n,), which may stay as it is.

    ``in_graph``: autograd has computed it from parameters, so that it is no data, mask or statistic. With ``bits`` 0
    nothing is quantized.
    """
    if role == "sign":
        # NaN is no zero: the backward of ReLU passes its gradient.
        packed = pack_codes((~(flat <= 0)).view(torch.uint8), 1)
        return Encoded((packed,), partial(_signs, length=len(flat), dtype=flat.dtype))
    if not flat.is_floating_point() and not flat.is_complex() and flat.dtype != torch.bool:
        return pack_integers(flat) or as_it_is(flat)
    if flat.dtype == torch.bool or (flat.dtype in _QUANTIZED and not in_graph):
        return pack_two_values(flat) or as_it_is(flat)
    if flat.dtype not in _QUANTIZED or role == "exact" or not bits:
        return as_it_is(flat)
    parts = quantize(flat, bits, generator())
    return Encoded(parts, partial(dequantize, bits=bits, length=len(flat), dtype=flat.dtype))


def _signs(packed: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    return unpack_codes(packed, 1, length).to(dtype)
