"""Local lengths of a sharded sequence, where user code writes lengths into sizes."""

from __future__ import annotations

from collections.abc import Collection
from math import prod


def place_of_positions(
    old: tuple[int, ...], sizes: tuple[int, ...], lengths: Collection[int], local: int, *, same_dims: bool
) -> tuple[int, int] | None:
    """Which of the sizes asked for means positions, and which dim of the value has all of them; None if there is none.

    Args:
        old: The shape of the value.
        sizes: What the code asks for.
        lengths: How many positions values in regions may have.
        local: How many this rank has of its own: what the code knows.
        same_dims: Whether dims stay what they are, counted from the end (``expand``); else they are split and joined.
    """
    found = []
    for place, size in enumerate(sizes):
        for dim, have in enumerate(old):
            if size != local or have not in lengths or have == local:
                continue
            if same_dims and len(sizes) - place == len(old) - dim:
                return place, dim
            is_explained = place < len(old) and place != dim and old[place] == size  # the batch, say
            if not same_dims and not is_explained and (place == dim or _fits(old, sizes, place, have)):
                found.append((place != dim, place, dim))
    return min(found)[1:] if found else None


def _fits(old: tuple[int, ...], sizes: tuple[int, ...], place: int, length: int) -> bool:
    """Whether as many elements are asked for as there are, with this length; or a multiple: heads of the whole, say."""
    wanted = prod(size for size in (*sizes[:place], length, *sizes[place + 1 :]) if size != -1)
    return prod(old) % wanted == 0 if -1 in sizes else wanted % prod(old) == 0
