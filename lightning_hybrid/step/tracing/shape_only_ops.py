"""Operations whose result depends on shapes alone: they run for real on every rank.

User code builds masks with them, keeps them, and does not build them again: they must not be nodes of the step graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.step.objects.pytree import flatten
from lightning_hybrid.step.standins.absent_tensors import is_absent

_FILLS = frozenset(
    {"ones_like", "zeros_like", "full_like", "empty_like", "new_ones", "new_zeros", "new_full", "new_empty"}
)


def fills(name: str) -> bool:
    """Whether an operation makes a tensor out of the shape, dtype and device of its first argument."""
    return name in _FILLS


def filled(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of such an operation as a real tensor; None if it depends on contents all the same.

    Args:
        func: The torch function.
        args: Its arguments.
        kwargs: Likewise.
    """
    like, *rest = args if args else [kwargs.get("input")]
    if not isinstance(like, Tensor) or like.layout is not torch.strided:
        return None
    others = [leaf for leaf in flatten((rest, dict(kwargs)))[0] if leaf is not like]
    if any(isinstance(leaf, Tensor) or is_absent(leaf) for leaf in others):
        return None
    with torch._C.DisableTorchFunction():
        # On the meta device only the strides of `like` are taken; nothing is computed.
        shape = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
        where = {"device": like.device, **kwargs}
        where.pop("input", None)
        return func(shape, *rest, **where)


def packed_sizes(args: Sequence[Any]) -> Tensor:
    """The batch sizes that packing padded sequences gives: they depend on the lengths alone.

    Args:
        args: Of ``torch._pack_padded_sequence``: padded sequences, their real lengths, whether the batch comes first.
    """
    padded, lengths, batch_first = args
    batch, time = padded.shape[:2] if batch_first else padded.shape[1::-1]
    with torch._C.DisableTorchFunction():
        empty = torch.zeros((batch, time, 1) if batch_first else (time, batch, 1))
        return torch._pack_padded_sequence(empty, lengths, batch_first)[1]
