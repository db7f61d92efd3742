"""Rows of feature maps: which a rank owns, and which it needs beside them from their owners.

    rank 0   rows 0 1 2 3 | 4            needs row 4 for its last output
    rank 1           3 | 4 5 6 7         needs row 3 for its first one

Exactly these rows are sent; gradients of them go back, and are added.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lightning_hybrid.logits.vocabulary import Vocabulary
from lightning_hybrid.tensor.collectives import Ranks

Interval = tuple[int, int]  # first row, and the one after the last; may reach beyond the tensor's edges


def owned(length: int, rank: int, size: int) -> Interval:
    """The rows of a rank: their numbers differ by one at most, and halves of a tensor's rows are owned alike."""
    return length * rank // size, length * (rank + 1) // size


def can_be_sharded(length: int, size: int) -> bool:
    """Whether each rank gets a row."""
    return length >= size


class Rows(Vocabulary):
    """The ranges of rows of a feature map, of nearly equal lengths.

    Attributes:
        length: The number of rows of the full map.
        offset: The first row of this rank.
        local_length: The number of rows of this rank.
        ranks: The ranks that share it.
        num_gathers: How often a full map was gathered on this rank.
    """

    def __init__(self, length: int, ranks: Ranks) -> None:
        self.length, self.ranks, self.num_gathers = length, ranks, 0
        first, last = owned(length, ranks.rank, ranks.size)
        self.offset, self.local_length = first, last - first

    @property
    def counts(self) -> list[int]:
        """The number of rows of each rank."""
        ends = [owned(self.length, rank, self.ranks.size) for rank in range(self.ranks.size)]
        return [last - first for first, last in ends]

    def joined(self, local: Tensor, dim: int) -> Tensor:
        """All-gathers this rank's rows (..., rows, ...) to the full map (..., length, ...)."""
        most, counts = max(self.counts), self.counts
        local = local.detach()
        if self.local_length < most:
            missing = local.narrow(dim, 0, 1).expand([most - 1 if k == dim else n for k, n in enumerate(local.shape)])
            local = torch.cat([local, missing.narrow(dim, 0, most - self.local_length)], dim)
        blocks = self.ranks.all_gather(local.contiguous())
        return torch.cat([block.narrow(dim, 0, count) for block, count in zip(blocks, counts, strict=True)], dim)


def _common(a: Interval, b: Interval) -> Interval:
    first = max(a[0], b[0])
    return first, max(first, min(a[1], b[1]))


@dataclass(frozen=True)
class Needs:
    """The rows that each rank needs of a tensor with ``length`` rows.

    Attributes:
        length: Rows of the full tensor.
        of_ranks: For each rank its interval; rows beyond an edge are padding.
    """

    length: int
    of_ranks: tuple[Interval, ...]

    @classmethod
    def of(cls, length: int, out_length: int, size: int, rows_of: Callable[[int, int], Interval]) -> Needs:
        """Asks ``rows_of(first, last)`` for the rows that outputs of a rank need, both ends included."""
        owns = [owned(out_length, rank, size) for rank in range(size)]
        return cls(length, tuple(rows_of(first, last - 1) for first, last in owns))

    def padding(self, rank: int) -> tuple[int, int]:
        """Rows before the first one and after the last one of the tensor."""
        first, last = self.of_ranks[rank]
        before = min(max(0, -first), last - first)
        return before, min(max(0, last - self.length), last - first - before)

    def _from(self, rank: int, owner: int) -> Interval:
        """The rows that a rank needs from an owner, as numbers of the full tensor."""
        return _common(self.of_ranks[rank], owned(self.length, owner, len(self.of_ranks)))

    def num_fetched(self, rank: int) -> int:
        """Number of rows that ``fetch`` returns on a rank."""
        first, last = self.of_ranks[rank]
        return last - first

    @cached_property
    def are_local(self) -> bool:
        """Whether no rank needs rows of others."""
        size = len(self.of_ranks)
        pairs = [(a, b) for a in range(size) for b in range(size) if a != b]
        return all(first == last for first, last in (self._from(a, b) for a, b in pairs))

    def fetch(self, local: Tensor, dim: int, rows: Vocabulary, fill: float = 0.0) -> Tensor:
        """Returns the rows that this rank needs, (..., rows, ...) along ``dim``, padding filled; collective.

        The local rows themselves where these are they.
        """
        rank, size = rows.ranks.rank, rows.ranks.size
        if self.of_ranks[rank] == owned(self.length, rank, size) and self.are_local:
            return local
        before, after = self.padding(rank)

        def filled(count: int) -> list[Tensor]:
            shape = [count if k == dim else length for k, length in enumerate(local.shape)]
            return [local.new_full(shape, fill)] if count else []

        received = self._exchanged(local, dim, rows)
        return torch.cat([*filled(before), *received, *filled(after)], dim)

    def _exchanged(self, local: Tensor, dim: int, rows: Vocabulary) -> list[Tensor]:
        rank, size = rows.ranks.rank, rows.ranks.size
        start = owned(self.length, rank, size)[0]

        def slice_of(interval: Interval) -> Tensor:
            return local.narrow(dim, interval[0] - start, interval[1] - interval[0])

        own = slice_of(self._from(rank, rank)) if self._spans(rank, rank) else None
        if self.are_local:
            return [] if own is None else [own]
        none = local.new_empty(0)
        sent = [
            slice_of(self._from(other, rank)).contiguous() if other != rank and self._spans(other, rank) else none
            for other in range(size)
        ]
        shapes = [self._shape(local, dim, rank, owner) if owner != rank else none.shape for owner in range(size)]
        blocks = rows.ranks.exchange(sent, shapes)
        found = [own if owner == rank else block for owner, block in enumerate(blocks)]
        return [block for owner, block in enumerate(found) if block is not None and self._spans(rank, owner)]

    def _spans(self, rank: int, owner: int) -> int:
        first, last = self._from(rank, owner)
        return last - first

    def _shape(self, local: Tensor, dim: int, rank: int, owner: int) -> torch.Size:
        count = self._spans(rank, owner)
        if not count:
            return torch.Size((0,))
        return torch.Size(count if k == dim else length for k, length in enumerate(local.shape))

    def give_back(self, fetched: Tensor, dim: int, rows: Vocabulary) -> Tensor:
        """Returns (..., rows, ...): for rows of this rank the sums of what all have for them; adjoint of ``fetch``."""
        rank, size = rows.ranks.rank, rows.ranks.size
        own = owned(self.length, rank, size)
        if self.of_ranks[rank] == own and self.are_local:
            return fetched
        start = self.of_ranks[rank][0]

        def slice_of(owner: int) -> Tensor:
            first, last = self._from(rank, owner)
            return fetched.narrow(dim, first - start, last - first)

        if self._from(rank, rank) == own:
            total = slice_of(rank)
            total = total if self.are_local else total.clone()
        else:
            shape = [own[1] - own[0] if k == dim else length for k, length in enumerate(fetched.shape)]
            total = fetched.new_zeros(shape)
            if self._spans(rank, rank):
                first, last = self._from(rank, rank)
                total.narrow(dim, first - own[0], last - first).copy_(slice_of(rank))
        if self.are_local:
            return total
        none = fetched.new_empty(0)
        sent = [
            slice_of(owner).contiguous() if owner != rank and self._spans(rank, owner) else none
            for owner in range(size)
        ]
        shapes = [self._shape(total, dim, other, rank) if other != rank else none.shape for other in range(size)]
        for other, block in enumerate(rows.ranks.exchange(sent, shapes)):
            if other != rank and self._spans(other, rank):
                first, last = self._from(other, rank)
                total.narrow(dim, first - own[0], last - first).add_(block)
        return total
