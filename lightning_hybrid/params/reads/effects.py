"""The effect of an operation on its tensors: reads their content, writes one of them, or uses a shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.params.reads.locations import Ranks
from lightning_hybrid.step.objects.op_names import READS, SIZED_BY_DATA, names
from lightning_hybrid.step.standins.absent_tensors import is_absent

# Besides reads: operations whose result's shape depends on content, and those that convert tensors to numbers.
_NEEDS_CONTENT = READS | SIZED_BY_DATA | names("tensor as_tensor asarray new_tensor __reduce_ex__")
# Of the first argument only dtype and device are used, not the content.
LIKE_FIRST = frozenset({"new_tensor"})
# Of the second argument only shape or dtype is used.
LIKE_SECOND = frozenset({"view_as", "expand_as", "reshape_as", "type_as"})
_INPLACE_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "div", "and", "or", "xor", "lshift", "rshift")
_INPLACE = frozenset({"__setitem__", *(f"__i{name}__" for name in _INPLACE_OPERATORS)})

# Inputs of one operation of at most this many elements together are sent to all ranks, which all compute the result.
_FEW_ELEMENTS = 1 << 16


def needs_content(name: str, leaves: Sequence[Any], args: Any) -> bool:
    """Whether an operation reads the content of its arguments, or makes a result whose shape depends on it."""
    if name == "__getitem__":
        return any(isinstance(leaf, Tensor) and leaf.dtype in (torch.bool, torch.uint8) for leaf in leaves[1:])
    return name in _NEEDS_CONTENT or (name == "where" and len(args) == 1)


def written_of(name: str, leaves: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """Index of the leaf that an operation writes; None if it makes a new tensor."""
    out = kwargs.get("out")
    if isinstance(out, Tensor):
        return next(i for i, leaf in enumerate(leaves) if leaf is out)
    if name in _INPLACE or (name.endswith("_") and not name.startswith("__")):
        return next((i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)), None)
    return None


def common_ranks(leaves: Sequence[Any], ranks: Sequence[Ranks]) -> Ranks:
    """The ranks that run an operation: those that have all inputs, else those that need the least sent."""
    limited = [(leaf.numel(), one) for leaf, one in zip(leaves, ranks, strict=True) if one is not None]
    common = [rank for rank in limited[0][1] if all(rank in one for _, one in limited)]
    if common:
        return tuple(common)
    if sum(size for size, _ in limited) <= _FEW_ELEMENTS:
        return None
    return max(limited, key=lambda pair: pair[0])[1]


def real(leaf: Any) -> Any:
    """Replace an absent tensor by a tensor of ones."""
    if isinstance(leaf, Tensor) and is_absent(leaf):
        return torch.ones(leaf.shape, dtype=leaf.dtype, device=leaf.device)
    return leaf
