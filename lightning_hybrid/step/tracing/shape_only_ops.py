"""Operations whose result depends on shapes alone: they run on every rank with real memory.

User code builds masks with them once and caches these: so they must not be nodes of the step graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.step.objects.pytree import flatten
from lightning_hybrid.step.standins.absent_tensors import is_absent

# Operations that create a tensor from the shape, dtype and device of their first argument.
FILL_OPS = frozenset(
    {"ones_like", "zeros_like", "full_like", "empty_like", "new_ones", "new_zeros", "new_full", "new_empty"}
)


def run_fill_op(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs an operation of ``FILL_OPS`` with real memory; None if its result depends on contents after all."""
    source, *rest = args if args else [kwargs.get("input")]
    if not isinstance(source, Tensor) or source.layout is not torch.strided:
        return None
    other_inputs = [leaf for leaf in flatten((rest, dict(kwargs)))[0] if leaf is not source]
    if any(isinstance(leaf, Tensor) or is_absent(leaf) for leaf in other_inputs):
        return None
    with torch._C.DisableTorchFunction():
        # A meta tensor with the strides of `source`; nothing is computed.
        shape = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device="meta")
        where = {"device": source.device, **kwargs}
        where.pop("input", None)
        return func(shape, *rest, **where)


def packed_sizes(args: Sequence[Any]) -> Tensor:
    """The batch sizes of packed sequences, of shape (longest sequence,), which depend on the lengths alone.

    Args:
        args: Of ``torch._pack_padded_sequence``: padded sequences, their lengths, ``batch_first``.
    """
    padded, lengths, batch_first = args
    batch, time = padded.shape[:2] if batch_first else padded.shape[1::-1]
    with torch._C.DisableTorchFunction():
        empty = torch.zeros((batch, time, 1) if batch_first else (time, batch, 1))
        return torch._pack_padded_sequence(empty, lengths, batch_first)[1]
