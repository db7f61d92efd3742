"""The dim of positions in view and expand sizes that user code computes from the length of a sequence shard."""

from __future__ import annotations

from collections.abc import Collection
from math import prod


def find_positions(
    old: tuple[int, ...], sizes: tuple[int, ...], lengths: Collection[int], local: int, *, same_dims: bool
) -> tuple[int, int] | None:
    """Finds the index in ``sizes`` that means positions, and the dim of the value that has all positions.

    Args:
        old: The shape of the value.
        sizes: The sizes that the code requests.
        lengths: The numbers of positions that values in regions may have.
        local: The number of positions in this rank's shard, from which the code computes sizes.
        same_dims: Whether dims stay what they are, counted from the end (``expand``); else they are split and joined.

    Returns:
        Index in ``sizes`` and dim of the value; None if no size means positions.
    """
    found = []
    for index, size in enumerate(sizes):
        for dim, have in enumerate(old):
            if size != local or have not in lengths or have == local:
                continue
            if same_dims and len(sizes) - index == len(old) - dim:
                return index, dim
            is_explained = index < len(old) and index != dim and old[index] == size  # the batch, say
            if not same_dims and not is_explained and (index == dim or _fits(old, sizes, index, have)):
                found.append((index != dim, index, dim))
    return min(found)[1:] if found else None


def _fits(old: tuple[int, ...], sizes: tuple[int, ...], index: int, length: int) -> bool:
    """Whether the value has as many elements as requested with this length; or a multiple: of all heads, say."""
    wanted = prod(size for size in (*sizes[:index], length, *sizes[index + 1 :]) if size != -1)
    return prod(old) % wanted == 0 if -1 in sizes else wanted % prod(old) == 0
