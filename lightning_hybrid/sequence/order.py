"""The positions that each rank of a ring attends from, chosen so that all ranks have the same work.

Where a query attends to all keys, each rank keeps its contiguous range of positions. With a causal mask the ranks of
later positions would have more work, up to twice the mean. So the sequence is divided into 2n chunks for n ranks, and
rank r attends from chunks r and 2n-1-r. The keys that come from another rank are needed either from its first chunk by
all queries, or from both chunks by the queries of the second one:

    4 ranks, rows: queries of a rank, columns: the rank the keys come from; areas in chunks x chunks

                    rank 0 (0, 7)   rank 1 (1, 6)   rank 2 (2, 5)   rank 3 (3, 4)
    rank 0 (0, 7)   causal          7 to 1, 6       7 to 2, 5       7 to 3, 4
    rank 1 (1, 6)   1, 6 to 0       causal          6 to 2, 5       6 to 3, 4
    rank 2 (2, 5)   2, 5 to 0       2, 5 to 1       causal          5 to 3, 4
    rank 3 (3, 4)   3, 4 to 0       3, 4 to 1       3, 4 to 2       causal

Each field is two chunks by chunks of scores. A rank's positions are in order, so the causal mask of its own block is
that of its local positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_hybrid.tensor.collectives import Ranks


class Block(NamedTuple):
    """The queries of this rank that attend to keys of another one, by local positions."""

    queries: slice  # the local queries
    keys: slice  # the local keys of the other rank
    is_causal: bool = False  # whether only to keys before them; the two are the same positions


_ALL = slice(None)


@dataclass(frozen=True)
class RingOrder:
    """The positions of each rank in a ring."""

    length: int  # number of positions of the full sequence
    size: int  # number of ranks
    is_causal: bool  # whether a query attends to keys before it alone

    def ranges(self, rank: int) -> list[tuple[int, int]]:
        """The positions of a rank, as ranges in their order."""
        if not self.is_causal:
            return contiguous_ranges(self.length, self.size)[rank]
        bounds = [chunk * self.length // (2 * self.size) for chunk in range(2 * self.size + 1)]
        return [(bounds[chunk], bounds[chunk + 1]) for chunk in (rank, 2 * self.size - 1 - rank)]

    def num_positions(self, rank: int) -> int:
        """Number of positions of a rank."""
        return sum(stop - start for start, stop in self.ranges(rank))

    def block(self, rank: int, other: int) -> Block:
        """What the queries of ``rank`` do with the keys of ``other``."""
        if rank == other or not self.is_causal:
            return Block(_ALL, _ALL, self.is_causal)
        first, last = self.ranges(rank)[0], self.ranges(other)[0]
        if other < rank:
            return Block(_ALL, slice(0, last[1] - last[0]))
        return Block(slice(first[1] - first[0], None), _ALL)


def contiguous_ranges(length: int, size: int) -> list[list[tuple[int, int]]]:
    """For each rank its one range, as `SequenceSharding` shards ``length`` positions over ``size`` ranks."""
    each, more = divmod(length, size)
    stops = [(rank + 1) * each + min(rank + 1, more) for rank in range(size)]
    return [[(start, stop)] for start, stop in zip([0, *stops], stops, strict=False)]


def to_ring_order(local: Tensor, order: RingOrder, ranks: Ranks) -> Tensor:
    """All-to-all: ``(..., contiguous positions, features)`` of each rank to the positions of the ring's order."""
    if not order.is_causal:
        return local
    have = contiguous_ranges(order.length, order.size)
    return _redistributed(local, have, [order.ranges(rank) for rank in range(order.size)], ranks)


def from_ring_order(local: Tensor, order: RingOrder, ranks: Ranks) -> Tensor:
    """All-to-all: the reverse of `to_ring_order`, to ``(..., contiguous positions, features)`` of each rank."""
    if not order.is_causal:
        return local
    wanted = contiguous_ranges(order.length, order.size)
    return _redistributed(local, [order.ranges(rank) for rank in range(order.size)], wanted, ranks)


_Ranges = list[tuple[int, int]]


def _redistributed(local: Tensor, have: list[_Ranges], wanted: list[_Ranges], ranks: Ranks) -> Tensor:
    sent = []
    for other in range(ranks.size):
        pieces = [local.narrow(-2, start, length) for start, _, length in _overlaps(have[ranks.rank], wanted[other])]
        sent.append(torch.cat(pieces, -2) if pieces else local.narrow(-2, 0, 0))
    overlaps = [list(_overlaps(have[other], wanted[ranks.rank])) for other in range(ranks.size)]
    shapes = [with_positions(local, sum(length for *_, length in found)) for found in overlaps]
    received = ranks.exchange(sent, shapes)
    result = local.new_empty(with_positions(local, sum(stop - start for start, stop in wanted[ranks.rank])))
    for block, found in zip(received, overlaps, strict=True):
        for piece, (_, start, length) in zip(block.split([n for *_, n in found], -2), found, strict=True):
            result.narrow(-2, start, length).copy_(piece)
    return result


def _overlaps(have: _Ranges, wanted: _Ranges) -> Iterator[tuple[int, int, int]]:
    """Yields the common ranges: local offset of the one who has it, of the one who wants it, and the length."""
    offset_wanted = 0
    for start_wanted, stop_wanted in wanted:
        offset_have = 0
        for start_have, stop_have in have:
            start, stop = max(start_have, start_wanted), min(stop_have, stop_wanted)
            if start < stop:
                yield offset_have + start - start_have, offset_wanted + start - start_wanted, stop - start
            offset_have += stop_have - start_have
        offset_wanted += stop_wanted - start_wanted


def with_positions(tensor: Tensor, length: int) -> torch.Size:
    """The shape of a tensor with another number of positions, which are in the last dim but one."""
    return torch.Size((*tensor.shape[:-2], length, tensor.shape[-1]))
