"""Local offsets into a sharded projection, where user code slices it by full sizes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch import Tensor

from lightning_hybrid.parts.placement import Piece, Shard


class CannotShard(RuntimeError):
    """The user's code did something in a sharded region that is not known to be right."""


def local_offset(placement: Shard, offset: int) -> int:
    """Where an offset into the whole lies on a rank."""
    local = placement.local_offset(offset)
    if local is None:
        raise CannotShard(f"offset {offset} lies inside a part of a projection of {placement.length} features")
    return local


def local_sections(placement: Shard, sections: int | list[int] | tuple[int, ...]) -> list[int]:
    """The sections of a split of the whole, as those of what a rank holds."""
    if isinstance(sections, int):
        whole = placement.length
        sections = [min(sections, whole - start) for start in range(0, whole, sections)]
    elif sum(sections) != placement.length:
        raise CannotShard(f"sections {list(sections)} do not fill a projection of {placement.length} features")
    bounds = [local_offset(placement, sum(sections[:k])) for k in range(len(sections) + 1)]
    return [stop - start for start, stop in pairwise(bounds)]


def local_index(index: Any, num_dims: int, placement: Shard, feature_dim: int) -> Any | None:
    """An index whose slice of the features is one of the whole's, as one of the local features; None if it has none.

    Args:
        index: What stands in the brackets.
        num_dims: Of the value that is indexed.
        placement: How its features are cut.
        feature_dim: Where they are, counted from the end.
    """
    items = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(item, Tensor) or item is None for item in items):
        return None
    if Ellipsis in items:
        at = items.index(Ellipsis)
        items[at : at + 1] = [slice(None)] * (num_dims - len(items) + 1)
    place = num_dims + feature_dim
    if place >= len(items) or not isinstance(items[place], slice):
        return None
    wanted = items[place]
    if wanted.step not in (None, 1) or (wanted.start is None and wanted.stop is None):
        return None
    start, stop, _ = wanted.indices(placement.length)
    items[place] = slice(local_offset(placement, start), local_offset(placement, stop))
    return tuple(items)


def local_pieces(lengths: tuple[int, ...], heads: tuple[int | None, ...], size: int) -> tuple[Piece, ...] | None:
    """Pieces of a projection dealt to ranks by whole heads; fewer heads than ranks are repeated; None if none fit."""
    pieces = []
    for length, num_heads in zip(lengths, heads, strict=True):
        if num_heads is None or num_heads % size == 0:
            parts = size
        elif size % num_heads == 0:
            parts = num_heads
        else:
            return None
        if length % parts:
            return None
        pieces.append(Piece(length, parts))
    return tuple(pieces)
