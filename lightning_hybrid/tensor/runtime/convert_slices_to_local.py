"""Local offsets into a sharded projection, where user code slices it by full sizes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch import Tensor

from lightning_hybrid.errors import CannotShard
from lightning_hybrid.parts.parameter_shard_placement import Shard


def local_offset(placement: Shard, offset: int) -> int:
    """Converts an offset into the full dim to an offset into a rank's shard."""
    local = placement.local_offset(offset)
    if local is None:
        raise CannotShard(
            f"offset {offset} falls inside a shard of a projection of {placement.length} features",
            entry="unproved-code",
        )
    return local


def local_sections(placement: Shard, sections: int | list[int] | tuple[int, ...]) -> list[int]:
    """Converts the sections of a ``split`` of the full dim to sections of a rank's shard."""
    if isinstance(sections, int):
        full = placement.length
        sections = [min(sections, full - start) for start in range(0, full, sections)]
    elif sum(sections) != placement.length:
        raise CannotShard(
            f"sections {list(sections)} do not fill a projection of {placement.length} features", entry="unproved-code"
        )
    bounds = [local_offset(placement, sum(sections[:k])) for k in range(len(sections) + 1)]
    return [stop - start for start, stop in pairwise(bounds)]


def local_index(index: Any, num_dims: int, placement: Shard, feature_dim: int) -> Any | None:
    """Converts an index that slices the full features to one that slices the local features; None if it slices none.

    Args:
        index: The index in the brackets.
        num_dims: Number of dims of the indexed value.
        placement: How its features are sharded.
        feature_dim: Their dim, counted from the end.
    """
    items = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(item, Tensor) or item is None for item in items):
        return None
    if Ellipsis in items:
        at = items.index(Ellipsis)
        items[at : at + 1] = [slice(None)] * (num_dims - len(items) + 1)
    dim = num_dims + feature_dim
    if dim >= len(items) or not isinstance(items[dim], slice):
        return None
    wanted = items[dim]
    if wanted.step not in (None, 1) or (wanted.start is None and wanted.stop is None):
        return None
    start, stop, _ = wanted.indices(placement.length)
    items[dim] = slice(local_offset(placement, start), local_offset(placement, stop))
    return tuple(items)
