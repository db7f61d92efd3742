"""Shard marks on values: over how many ranks their features are cut."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from lightning_hybrid.parts.placement import Shard


def mark(tensor: Tensor, size: int, column: tuple[Shard, int] | None = None) -> Tensor:
    """Say over how many ranks a value is cut; and how along which dim, if offsets into it are in terms of the whole."""
    tensor._cut_over = size  # type: ignore[attr-defined]
    if column is not None:
        tensor._column = column  # type: ignore[attr-defined]
    return tensor


def cut_over(value: Any) -> int:
    """Over how many ranks a value is cut; 0 if it is not."""
    size: int = getattr(value, "_cut_over", 0)
    return size


def marked(value: Any, size: int) -> Any:
    """A result with all its tensors marked."""
    if isinstance(value, Tensor):
        value._cut_over = size  # type: ignore[attr-defined]
    elif isinstance(value, (tuple, list)):
        for item in value:
            marked(item, size)
    return value


def tensors_in(values: Any) -> Iterator[Tensor]:
    """The tensors among values and inside tuples and lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif type(value) in (tuple, list):
            yield from tensors_in(value)
