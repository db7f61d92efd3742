"""Choice of the encoding of a saved tensor: exact bits where the backward needs no more, quantized, or unchanged.

saved tensor                                          encoding
result of ReLU, saved by ReLU                         one bit: its backward needs the sign
dropout and other masks, of two values                one bit per value, exact
integers: indices of max-pooling, tokens              distances from the smallest, exact
result of log-softmax or logsumexp, saved by it       none: the backward takes its exponential
inputs of attention and logsumexp                     quantized to 8 bits at least, for the same reason
statistics, data: floating point, outside the graph   none
other results of the graph: activations               quantized in groups
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_hybrid.memory.saved_activations.exact_bit_packing import (
    TwoValues,
    pack_codes,
    pack_integers,
    pack_two_values,
    unpack_codes,
    unpack_integers,
)
from lightning_hybrid.memory.saved_activations.quantize_in_groups import dequantize, quantize

Role: TypeAlias = Literal["sign", "exact", "value"]
_QUANTIZED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_EXPONENTIALS = ("scaled_dot_product_attention", "logsumexp")
_BY_SIGN = "ReluBackward0"
_EXACT = ("LogSoftmaxBackward0", "LogsumexpBackward0")


class Encoded(NamedTuple):
    """An encoded tensor: its parts, and the function that makes it, of shape (n,), from them."""

    parts: tuple[Tensor, ...]
    decode: Callable[..., Tensor]


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


def encode(
    flat: Tensor, role: Role, *, in_graph: bool, bits: int | None, generator: Callable[[], torch.Generator]
) -> Encoded | None:
    """Encodes a tensor.

    Args:
        flat: Of shape (n,).
        role: What the backward needs of it.
        in_graph: Whether autograd has computed it from parameters, so that it is no data, mask or statistic.
        bits: Of a quantized value; None quantizes nothing.
        generator: Returns the generator of the rounding.

    Returns:
        The encoded tensor; None if it stays as it is.
    """
    if role == "sign":
        # NaN is no zero: the backward of ReLU passes its gradient.
        packed = pack_codes((~(flat <= 0)).view(torch.uint8), 1)
        return Encoded((packed,), partial(_signs, length=len(flat), dtype=flat.dtype))
    if not flat.is_floating_point() and not flat.is_complex() and flat.dtype != torch.bool:
        integers = pack_integers(flat)
        return None if integers is None else Encoded(integers, unpack_integers)
    if flat.dtype == torch.bool or (flat.dtype in _QUANTIZED and not in_graph):
        two = pack_two_values(flat)
        return None if two is None else Encoded((two.packed, two.values), partial(_two_values, length=len(flat)))
    if flat.dtype not in _QUANTIZED or role == "exact" or bits is None:
        return None
    parts = quantize(flat, bits, generator())
    return Encoded(parts, partial(dequantize, bits=bits, length=len(flat), dtype=flat.dtype))


def _signs(packed: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    return unpack_codes(packed, 1, length).to(dtype)


def _two_values(packed: Tensor, values: Tensor, length: int) -> Tensor:
    return TwoValues(packed, values, length).decode()
