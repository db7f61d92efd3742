"""Placements of parameters over tensor ranks, as data, and how a full one is cut and joined.

A parameter is either whole on every rank, or cut along one dim. What is cut consists of pieces, one after the other
(a fused projection holds queries, keys and values), and every rank gets its part of each piece:

    whole   q0 q1 q2 q3 | k0 k1 | v0 v1        3 pieces
    rank 0  q0 q1 | k0 | v0
    rank 1  q2 q3 | k1 | v1

A piece with fewer parts than ranks (key heads that several query heads read) is repeated: ranks next to each other
hold the same part. A vocabulary that the ranks do not divide has a last part that is smaller than the others. Of an
expert with parameters of its own, one rank holds all and the others hold nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Replicated:
    """Whole, and equal, on every rank."""


@dataclass(frozen=True)
class Piece:
    """A stretch of a cut dim.

    Attributes:
        length: Its size in the whole parameter.
        parts: Into how many parts it is cut; divides the number of ranks, and the length if they are equal.
        uneven: Whether the last parts may be smaller than the others.
        owner: The rank that holds all of it, if one does; the parts are then as many as ranks, and uneven.
    """

    length: int
    parts: int
    uneven: bool = False
    owner: int | None = None

    def __post_init__(self) -> None:
        if self.uneven and self.parts >= 1:
            return
        if self.parts < 1 or self.length % self.parts:
            equal = "" if self.uneven else " equal"
            raise ValueError(f"a piece of length {self.length} cannot be cut into {self.parts}{equal} parts")

    @property
    def local_length(self) -> int:
        """Its size on one rank; of an uneven piece on the rank that holds most."""
        return self.length if self.owner is not None else -(-self.length // self.parts)

    def part_length(self, part: int) -> int:
        """The size of one part."""
        if self.owner is not None:
            return self.length if part == self.owner else 0
        return max(0, min(self.local_length, self.length - part * self.local_length))

    def start_of(self, part: int) -> int:
        """Where one part begins."""
        return 0 if part == self.owner else min(part * self.local_length, self.length)

    def part_of(self, rank: int, size: int) -> int:
        """Which part a rank holds."""
        if size % self.parts:
            raise ValueError(f"a piece in {self.parts} parts cannot be dealt to {size} ranks evenly")
        return rank * self.parts // size

    def is_first(self, rank: int, size: int) -> bool:
        """Whether no rank before this one holds the same part."""
        return rank == 0 or self.part_of(rank - 1, size) != self.part_of(rank, size)


@dataclass(frozen=True)
class Shard:
    """Cut along one dim, piece by piece.

    Attributes:
        dim: The dim that is cut.
        pieces: What lies along it, in order; one piece for an ordinary parameter.
    """

    dim: int
    pieces: tuple[Piece, ...]

    @classmethod
    def evenly(cls, dim: int, length: int, size: int) -> Shard:
        """One piece with a part for each rank."""
        return cls(dim, (Piece(length, size),))

    @classmethod
    def unevenly(cls, dim: int, length: int, size: int) -> Shard:
        """One piece with a part for each rank, the last one smaller if need be.

        Raises:
            ValueError: There would be nothing left for the last rank.
        """
        found = cls.shared_out(dim, length, size)
        if not found.pieces[0].part_length(size - 1):
            raise ValueError(f"a piece of length {length} cannot be cut into {size} parts, none of them empty")
        return found

    @classmethod
    def shared_out(cls, dim: int, length: int, size: int) -> Shard:
        """One piece with a part for each rank, the last ones smaller, or nothing, if need be."""
        return cls(dim, (Piece(length, size, uneven=length % size > 0),))

    @classmethod
    def owned(cls, length: int, size: int, owner: int) -> Shard:
        """One piece, of the first dim, all of which one rank holds."""
        return cls(0, (Piece(length, size, uneven=True, owner=owner),))

    def __post_init__(self) -> None:
        if self.is_uneven and len(self.pieces) > 1:
            raise ValueError(f"{len(self.pieces)} pieces along one dim cannot have parts of different sizes")

    @property
    def is_uneven(self) -> bool:
        """Whether ranks hold parts of different sizes."""
        return any(piece.uneven for piece in self.pieces)

    @property
    def is_owned(self) -> bool:
        """Whether one rank holds all of it."""
        return self.pieces[0].owner is not None

    @property
    def length(self) -> int:
        """The size of the dim in the whole parameter."""
        return sum(piece.length for piece in self.pieces)

    @property
    def local_length(self) -> int:
        """The size of the dim on one rank, on the first one if parts differ."""
        return sum(piece.local_length for piece in self.pieces)

    def is_repeated(self, size: int) -> bool:
        """Whether some ranks hold the same part of a piece, so that its gradient is a sum over them."""
        return any(piece.parts < size for piece in self.pieces)

    def ranges(self, rank: int, size: int) -> list[tuple[int, int]]:
        """Start and length in the whole of what a rank holds, one for each piece."""
        found, offset = [], 0
        for piece in self.pieces:
            part = piece.part_of(rank, size)
            found.append((offset + piece.start_of(part), piece.part_length(part)))
            offset += piece.length
        return found

    def places(self, size: int) -> list[tuple[int, int, int, int]]:
        """The first rank that holds a part, where it begins there and in the whole, and its length; for each part."""
        found, start, offset = [], 0, 0
        for piece in self.pieces:
            found += [
                (part * size // piece.parts, start, offset + piece.start_of(part), piece.part_length(part))
                for part in range(piece.parts)
            ]
            start += piece.local_length
            offset += piece.length
        return found

    def local_offset(self, offset: int) -> int | None:
        """Where an offset into the whole lies on a rank; None if that is no clean cut of a piece."""
        start = local_start = 0
        for piece in self.pieces:
            if offset < start + piece.length:
                inside = offset - start
                return None if inside % piece.parts else local_start + inside // piece.parts
            start += piece.length
            local_start += piece.local_length
        return local_start if offset == start else None


Placement = Replicated | Shard


def over_two(placement: Shard, outer: int, inner: int) -> tuple[Placement, Shard] | None:
    """A cut over the ranks of two axes as two cuts, one after the other.

    Args:
        placement: Over ``outer * inner`` ranks, of which `outer rank * inner + inner rank` is one.
        outer: Ranks of the first axis.
        inner: Ranks of the second axis.

    Returns:
        The cut over the first axis, and that of what a rank has then over the second; None if there are no such.
    """
    first: list[Piece] = []
    second: list[Piece] = []
    for piece in placement.pieces:
        parts = math.gcd(piece.parts, outer)
        if piece.uneven or parts not in (piece.parts, outer):
            return None
        first.append(Piece(piece.length, parts))
        second.append(Piece(piece.length // parts, piece.parts // parts))
    further = Shard(placement.dim, tuple(second))
    return (Replicated() if outer == 1 else Shard(placement.dim, tuple(first))), further


def cut(whole: Tensor, placement: Placement, rank: int, size: int) -> Tensor:
    """What a rank holds of a whole parameter.

    Args:
        whole: The parameter.
        placement: Where its parts live.
        rank: The tensor rank.
        size: Number of tensor ranks.

    Returns:
        A tensor that shares no memory with ``whole`` if it is cut, and ``whole`` itself if it is replicated.

    Raises:
        ValueError: The placement is one of a parameter of another size.
    """
    if isinstance(placement, Replicated):
        return whole
    if whole.shape[placement.dim] != placement.length:
        raise ValueError(
            f"the placement cuts a dim of {placement.length}, but dim {placement.dim} of shape {tuple(whole.shape)} "
            f"has {whole.shape[placement.dim]}; plan the unit again"
        )
    ranges = placement.ranges(rank, size)
    return torch.cat([whole.narrow(placement.dim, start, length) for start, length in ranges], placement.dim)


def join(parts: Sequence[Tensor], placement: Placement) -> Tensor:
    """The whole parameter from what each rank holds; the inverse of `cut`.

    Args:
        parts: The local tensors in the order of ranks; `padded` ones will do.
        placement: Where the parts live.
    """
    if isinstance(placement, Replicated):
        return parts[0]
    places = placement.places(len(parts))
    return torch.cat([parts[rank].narrow(placement.dim, start, n) for rank, start, _, n in places], placement.dim)


def padded(local: Tensor, placement: Shard) -> Tensor:
    """What a rank holds, with zeros at its end if others hold more: ranks exchange tensors of one shape."""
    missing = placement.local_length - local.shape[placement.dim]
    if not missing:
        return local
    shape = list(local.shape)
    shape[placement.dim] = missing
    return torch.cat([local, local.new_zeros(shape)], placement.dim)


def spread(local: Tensor, placement: Shard, rank: int, size: int) -> Tensor:
    """What a rank holds, in its place in a whole of zeros; summed over ranks, repeated parts are sums too."""
    shape = list(local.shape)
    shape[placement.dim] = placement.length
    whole = local.new_zeros(shape)
    start = 0
    for place, length in placement.ranges(rank, size):
        whole.narrow(placement.dim, place, length).copy_(local.narrow(placement.dim, start, length))
        start += length
    return whole
