"""Boxes of a full tensor that a rank holds, and their offsets in its local shard: what checkpoints write and read.

full    q0 q1 q2 q3 | k0 k1        two pieces, sharded over two tensor ranks
rank 0  q0 q1 | k0                 two boxes: q0 q1 at 0 of the full tensor and 0 of the shard, k0 at 4 and 2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from lightning_hybrid.params.shards import AxisSharding

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ShardBox:
    """A box of a full tensor that is also a box of a rank's local shard."""

    offsets: Shape  # in the full tensor
    local: Shape  # offsets in the local shard
    sizes: Shape  # extent of the box, in both
    is_first: bool = True  # whether this is the first rank that holds it along each axis that shards the tensor

    def of(self, shard: Tensor) -> Tensor:
        """The box, of shape ``sizes``, as a view of the local shard."""
        for dim, (start, size) in enumerate(zip(self.local, self.sizes, strict=True)):
            if size != shard.shape[dim]:
                shard = shard.narrow(dim, start, size)
        return shard

    def in_full_tensor(self) -> ShardBox:
        """The box with offsets in the full tensor, for a rank that has all of it."""
        return replace(self, local=self.offsets)


@dataclass(frozen=True)
class ShardBoxes:
    """A rank's local shard of a tensor, as boxes."""

    shape: Shape  # of the local shard
    spans: tuple[ShardBox, ...]  # the boxes of the full tensor that it consists of


def shard_of(shardings: Sequence[AxisSharding], name: str, shape: Sequence[int]) -> ShardBoxes:
    """The boxes of this rank's shard of a parameter, or of a tensor of its shape.

    ``shardings`` go from the full tensor to the local shard.
    """
    zeros = (0,) * len(shape)
    shard = ShardBoxes(tuple(shape), (ShardBox(zeros, zeros, tuple(shape)),))
    for axis in shardings:
        if name in axis.placements:
            shard = _shard_further(shard, axis, name)
    return shard


def _shard_further(shard: ShardBoxes, axis: AxisSharding, name: str) -> ShardBoxes:
    placement, rank, size = axis.placements[name], axis.group.rank(), axis.group.size()
    dim, end, found = placement.dim, 0, []
    for piece, (start, length) in zip(placement.pieces, placement.ranges(rank, size), strict=True):
        for span in shard.spans:
            begin = max(start, span.local[dim])
            stop = min(start + length, span.local[dim] + span.sizes[dim])
            if begin < stop:
                found.append(
                    ShardBox(
                        _with(span.offsets, dim, span.offsets[dim] + begin - span.local[dim]),
                        _with(span.local, dim, end + begin - start),
                        _with(span.sizes, dim, stop - begin),
                        span.is_first and piece.is_first(rank, size),
                    )
                )
        end += length
    return ShardBoxes(_with(shard.shape, dim, end), tuple(found))


def _with(shape: Shape, dim: int, size: int) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])
