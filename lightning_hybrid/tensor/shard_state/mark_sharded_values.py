"""Marks on values of the number of ranks that their features are sharded over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from lightning_hybrid.params.placement import Shard


def mark(tensor: Tensor, size: int, column: tuple[Shard, int] | None = None, *, linear: str = "") -> Tensor:
    """Marks a value as sharded over ``size`` ranks.

    Args:
        tensor: The local value, of any shape.
        size: Number of ranks.
        column: Placement and dim, if code uses full offsets.
        linear: FQN of the linear whose output it is.
    """
    tensor._sharded_over = size  # type: ignore[attr-defined]
    if column is not None:
        tensor._column = column  # type: ignore[attr-defined]
    if linear:
        tensor._linear = linear  # type: ignore[attr-defined]
    return tensor


def linear_of(tensor: Tensor) -> str:
    """The FQN of the linear whose output a sharded value, of any shape, is; "" for other values."""
    fqn: str = getattr(tensor, "_linear", "")
    return fqn


def sharded_over(value: Any) -> int:
    """The number of ranks that a value is sharded over; 0 if it is not sharded."""
    size: int = getattr(value, "_sharded_over", 0)
    return size


def mark_all(value: Any, size: int) -> Any:
    """Marks all tensors of a result as sharded over ``size`` ranks."""
    if isinstance(value, Tensor):
        value._sharded_over = size  # type: ignore[attr-defined]
    elif isinstance(value, (tuple, list)):
        for item in value:
            mark_all(item, size)
    return value


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Yields the tensors, of any shape, among values and inside tuples and lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif type(value) in (tuple, list):
            yield from tensors_in(value)
