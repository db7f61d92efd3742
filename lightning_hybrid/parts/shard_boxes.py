"""Boxes of a full tensor that a rank holds, and where they lie in its shard: what checkpoints write and read.

whole   q0 q1 q2 q3 | k0 k1        cut in two pieces over two tensor ranks
rank 0  q0 q1 | k0                 two spans: q0 q1 at 0 of the whole and 0 of the part, k0 at 4 and 2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from lightning_hybrid.parts.local_shards import AxisCut

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Span:
    """A box of a whole tensor that is also a box of a rank's part of it.

    Attributes:
        offsets: In the whole.
        local: Offsets in the part.
        sizes: Of both.
        is_first: Whether no rank before this one along an axis that cuts the tensor holds the same.
    """

    offsets: Shape
    local: Shape
    sizes: Shape
    is_first: bool = True

    def of(self, part: Tensor) -> Tensor:
        """A view of it in the part."""
        for dim, (start, size) in enumerate(zip(self.local, self.sizes, strict=True)):
            if size != part.shape[dim]:
                part = part.narrow(dim, start, size)
        return part

    def in_whole(self) -> Span:
        """The same for a rank that has the whole."""
        return replace(self, local=self.offsets)


@dataclass(frozen=True)
class Part:
    """What a rank keeps of a tensor.

    Attributes:
        shape: Of the part.
        spans: Of the whole that it consists of.
    """

    shape: Shape
    spans: tuple[Span, ...]


def part_of(cuts: Sequence[AxisCut], name: str, shape: Sequence[int]) -> Part:
    """What this rank keeps of a parameter, or of what has its shape.

    Args:
        cuts: From the whole to what a rank holds.
        name: FQN of the parameter.
        shape: Of the whole.
    """
    zeros = (0,) * len(shape)
    part = Part(tuple(shape), (Span(zeros, zeros, tuple(shape)),))
    for axis in cuts:
        if name in axis.placements:
            part = _cut_further(part, axis, name)
    return part


def _cut_further(part: Part, axis: AxisCut, name: str) -> Part:
    placement, rank, size = axis.placements[name], axis.group.rank(), axis.group.size()
    dim, end, found = placement.dim, 0, []
    for piece, (start, length) in zip(placement.pieces, placement.ranges(rank, size), strict=True):
        for span in part.spans:
            begin = max(start, span.local[dim])
            stop = min(start + length, span.local[dim] + span.sizes[dim])
            if begin < stop:
                found.append(
                    Span(
                        _with(span.offsets, dim, span.offsets[dim] + begin - span.local[dim]),
                        _with(span.local, dim, end + begin - start),
                        _with(span.sizes, dim, stop - begin),
                        span.is_first and piece.is_first(rank, size),
                    )
                )
        end += length
    return Part(_with(part.shape, dim, end), tuple(found))


def _with(shape: Shape, dim: int, size: int) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])
