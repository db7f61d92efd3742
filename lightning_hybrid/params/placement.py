"""Placements of parameters over tensor ranks, as data; functions that shard a full parameter, and join shards.

A parameter is either replicated, or sharded along one dim. The sharded dim consists of pieces, one after the other (a
fused projection holds queries, keys and values), and every rank gets a shard of each piece:

    full    q0 q1 q2 q3 | k0 k1 | v0 v1        3 pieces
    rank 0  q0 q1 | k0 | v0
    rank 1  q2 q3 | k1 | v1

A piece with fewer shards than ranks (key heads that several query heads read) is repeated: adjacent ranks hold the same
shard. A vocabulary that the number of ranks does not divide has a last shard that is smaller than the others. An
expert's own parameters are held by one owner rank, and the shards of the other ranks are empty.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Replicated:
    """Full, and equal, on every rank."""


@dataclass(frozen=True)
class Piece:
    """A contiguous range of the sharded dim."""

    length: int  # its size in the full parameter
    parts: int  # number of its shards; divides the number of ranks, and the length if shards are equal
    uneven: bool = False  # whether the last shards may be smaller than the others
    owner: int | None = None  # the rank that holds all of it, if one does; it then has a shard per rank, and is uneven

    def __post_init__(self) -> None:
        if self.uneven and self.parts >= 1:
            return
        if self.parts < 1 or self.length % self.parts:
            equal = "" if self.uneven else " equal"
            raise ValueError(f"a piece of length {self.length} cannot be sharded into {self.parts}{equal} shards")

    @property
    def local_length(self) -> int:
        """Its size on one rank; of an uneven piece, on the rank that holds most."""
        return self.length if self.owner is not None else -(-self.length // self.parts)

    def shard_length(self, shard: int) -> int:
        """Size of one shard."""
        if self.owner is not None:
            return self.length if shard == self.owner else 0
        return max(0, min(self.local_length, self.length - shard * self.local_length))

    def shard_start(self, shard: int) -> int:
        """Start of one shard in the piece."""
        return 0 if shard == self.owner else min(shard * self.local_length, self.length)

    def shard_index(self, rank: int, size: int) -> int:
        """Index of the shard that a rank holds."""
        if size % self.parts:
            raise ValueError(f"a piece of {self.parts} shards cannot be split evenly over {size} ranks")
        return rank * self.parts // size

    def is_first(self, rank: int, size: int) -> bool:
        """Whether this is the first rank that holds its shard."""
        return rank == 0 or self.shard_index(rank - 1, size) != self.shard_index(rank, size)


@dataclass(frozen=True)
class Shard:
    """Sharded along one dim, piece by piece.

    Attributes:
        dim: The sharded dim.
        pieces: The ranges along it, in order; one for an ordinary parameter.
    """

    dim: int
    pieces: tuple[Piece, ...]

    @classmethod
    def evenly(cls, dim: int, length: int, size: int) -> Shard:
        """One piece, with a shard of equal size for each rank."""
        return cls(dim, (Piece(length, size),))

    @classmethod
    def unevenly(cls, dim: int, length: int, size: int) -> Shard:
        """One piece with a shard for each rank; the last shard may be smaller.

        Raises:
            ValueError: The shard of the last rank would be empty.
        """
        found = cls.allowing_empty(dim, length, size)
        if not found.pieces[0].shard_length(size - 1):
            raise ValueError(f"a piece of length {length} cannot be sharded into {size} shards, none of them empty")
        return found

    @classmethod
    def allowing_empty(cls, dim: int, length: int, size: int) -> Shard:
        """One piece with a shard for each rank; the last shards may be smaller, or empty."""
        return cls(dim, (Piece(length, size, uneven=length % size > 0),))

    @classmethod
    def owned(cls, length: int, size: int, owner: int) -> Shard:
        """One piece, of the first dim, that one rank holds in full."""
        return cls(0, (Piece(length, size, uneven=True, owner=owner),))

    def __post_init__(self) -> None:
        if self.is_uneven and len(self.pieces) > 1:
            raise ValueError(f"{len(self.pieces)} pieces along one dim cannot have shards of different sizes")

    @property
    def is_uneven(self) -> bool:
        """Whether ranks hold shards of different sizes."""
        return any(piece.uneven for piece in self.pieces)

    @property
    def is_owned(self) -> bool:
        """Whether one rank holds all of it."""
        return self.pieces[0].owner is not None

    @property
    def length(self) -> int:
        """Size of the dim in the full parameter."""
        return sum(piece.length for piece in self.pieces)

    @property
    def local_length(self) -> int:
        """Size of the dim on one rank; on the first one if shards differ in size."""
        return sum(piece.local_length for piece in self.pieces)

    def scaled_to(self, length: int) -> Shard:
        """The sharding of a dim of another length, whose pieces have the same shares of it.

        Raises:
            ValueError: A piece has no equal share in that length, or cannot be sharded.
        """
        return replace(
            self, pieces=tuple(replace(p, length=scaled(p.length, self.length, length)) for p in self.pieces)
        )

    def is_repeated(self, size: int) -> bool:
        """Whether some ranks hold the same shard of a piece, so that its gradient is a sum over them."""
        return any(piece.parts < size for piece in self.pieces)

    def ranges(self, rank: int, size: int) -> list[tuple[int, int]]:
        """Start and length, in the full dim, of a rank's shard of each piece."""
        found, offset = [], 0
        for piece in self.pieces:
            shard = piece.shard_index(rank, size)
            found.append((offset + piece.shard_start(shard), piece.shard_length(shard)))
            offset += piece.length
        return found

    def view(self, full: Tensor, rank: int, size: int) -> Tensor:
        """A rank's shard of a full tensor as a view of it, of shape (..., length of the shard, ...); for one piece."""
        ((start, length),) = self.ranges(rank, size)
        return full.narrow(self.dim, start, length)

    def views(self, full: Tensor, size: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield ranks, and their shards of a full tensor as one view of it, (ranks, ..., length of a shard, ...).

        For one piece: all ranks with equal shards together, then one whose shard is smaller. Others have none.
        """
        length = self.local_length
        whole = min(size, self.length // length) if length else 0
        rest = self.length - whole * length
        if whole:
            equal = full.narrow(self.dim, 0, whole * length).unflatten(self.dim, (whole, length))
            yield slice(whole), equal.movedim(self.dim, 0)
        if rest:
            yield slice(whole, whole + 1), full.narrow(self.dim, whole * length, rest).unsqueeze(0)

    def shard_ranges(self, size: int) -> list[tuple[int, int, int, int]]:
        """For each shard its first rank, its start on that rank and in the full dim, and its length."""
        found, start, offset = [], 0, 0
        for piece in self.pieces:
            found += [
                (shard * size // piece.parts, start, offset + piece.shard_start(shard), piece.shard_length(shard))
                for shard in range(piece.parts)
            ]
            start += piece.local_length
            offset += piece.length
        return found

    def local_offset(self, offset: int) -> int | None:
        """Local offset of an offset into the full dim; None if it splits its piece unevenly over the shards."""
        start = local_start = 0
        for piece in self.pieces:
            if offset < start + piece.length:
                inside = offset - start
                return None if inside % piece.parts else local_start + inside // piece.parts
            start += piece.length
            local_start += piece.local_length
        return local_start if offset == start else None


Placement = Replicated | Shard


def scaled(value: int, size: int, other: int) -> int:
    """A share of a size, as the same share of another size.

    Raises:
        ValueError: It is no integer.
    """
    if value * other % size:
        raise ValueError(f"{value} of {size} has no equal share in {other}")
    return value * other // size


def split_over_two_axes(placement: Shard, outer: int, inner: int) -> tuple[Placement, Shard] | None:
    """A sharding over the ranks of two axes, as two shardings one after the other.

    The rank of ``placement`` is `outer rank * inner + inner rank`.

    Returns:
        The sharding over the first axis, and over the second one that of its shards; None if there are no such.
    """
    first: list[Piece] = []
    second: list[Piece] = []
    for piece in placement.pieces:
        shards = math.gcd(piece.parts, outer)
        if piece.uneven or shards not in (piece.parts, outer):
            return None
        first.append(Piece(piece.length, shards))
        second.append(Piece(piece.length // shards, piece.parts // shards))
    further = Shard(placement.dim, tuple(second))
    return (Replicated() if outer == 1 else Shard(placement.dim, tuple(first))), further


def shard_tensor(full: Tensor, placement: Placement, rank: int, size: int) -> Tensor:
    """Return one rank's shard of a full parameter of any shape, which ``size`` ranks shard.

    Returns:
        A tensor of shape (..., length of the rank's shard, ...) that shares no memory with ``full`` if it is sharded,
            and ``full`` itself if it is replicated.

    Raises:
        ValueError: The placement belongs to a parameter of another size.
    """
    if isinstance(placement, Replicated):
        return full
    if full.shape[placement.dim] != placement.length:
        raise ValueError(
            f"the placement shards a dim of {placement.length}, but dim {placement.dim} of shape {tuple(full.shape)} "
            f"has {full.shape[placement.dim]}; plan the unit again"
        )
    ranges = placement.ranges(rank, size)
    return torch.cat([full.narrow(placement.dim, start, length) for start, length in ranges], placement.dim)


def join(shards: Sequence[Tensor], placement: Placement) -> Tensor:
    """Join the shards of all ranks, in their order, to a tensor of the full shape; the inverse of `shard_tensor`.

    The shards may be `padded`.
    """
    if isinstance(placement, Replicated):
        return shards[0]
    ranges = placement.shard_ranges(len(shards))
    return torch.cat([shards[rank].narrow(placement.dim, start, n) for rank, start, _, n in ranges], placement.dim)


def padded(local: Tensor, placement: Shard) -> Tensor:
    """The local shard (..., length, ...), zero-padded to the largest length: ranks exchange tensors of one shape."""
    missing = placement.local_length - local.shape[placement.dim]
    if not missing:
        return local
    shape = list(local.shape)
    shape[placement.dim] = missing
    return torch.cat([local, local.new_zeros(shape)], placement.dim)


def embed_in_zeros(local: Tensor, placement: Shard, rank: int, size: int) -> Tensor:
    """A tensor of full shape, zero but for a rank's shard; a sum of them over ranks also sums repeated shards."""
    shape = list(local.shape)
    shape[placement.dim] = placement.length
    full = local.new_zeros(shape)
    start = 0
    for place, length in placement.ranges(rank, size):
        full.narrow(placement.dim, place, length).copy_(local.narrow(placement.dim, start, length))
        start += length
    return full
