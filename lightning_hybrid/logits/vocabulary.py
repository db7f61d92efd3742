"""The vocabulary shard of a rank: the range of its rows, its local tensor, and the gathered full tensor.

The results of operations on it are defined in ``sharded`` and ``rules``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.params.placement import Shard, join, padded
from lightning_hybrid.step.standins.tensors import ShardedTensorBase
from lightning_hybrid.tensor.collectives import Ranks


class Vocabulary:
    """The ranges of rows into which a vocabulary is sharded over ranks.

    Attributes:
        length: The number of rows of the full vocabulary.
        offset: The first row of this rank.
        local_length: The number of rows of this rank.
        ranks: The ranks that hold the shards.
        num_gathers: How often a full tensor was gathered on this rank.
    """

    def __init__(self, length: int, ranks: Ranks) -> None:
        """Shards ``length`` rows over the ranks, the last one with fewer rows if need be."""
        self.length, self.ranks = length, ranks
        ((self.offset, self.local_length),) = self.shard(0).ranges(ranks.rank, ranks.size)
        self.num_gathers = 0

    def shard(self, dim: int) -> Shard:
        """The placement of a tensor that is sharded along ``dim``."""
        return Shard.unevenly(dim, self.length, self.ranks.size)

    def local_rows(self, full: Tensor, dim: int) -> Tensor:
        """This rank's rows of a full tensor, of any shape with ``length`` rows along ``dim``, as a view."""
        return full.narrow(dim, self.offset, self.local_length)

    def joined(self, local: Tensor, dim: int) -> Tensor:
        """All-gathers this rank's rows (..., rows, ...) to the full tensor (..., length, ...)."""
        placement = self.shard(dim)
        return join(self.ranks.all_gather(padded(local.detach(), placement).contiguous()), placement)

    def summed(self, addend: Tensor) -> Tensor:
        """The sum over the ranks, of the same shape, in the memory of the addend if that is dense."""
        addend = addend.contiguous()
        self.ranks.all_reduce(addend)
        return addend

    def located(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Converts rows of the full vocabulary to local rows, and a mask of other ranks' rows, which become 0.

        Both have the shape of ``rows``, which is any.
        An index outside the full vocabulary stays out of range on the first or on the last rank, so that a lookup there
        raises as it does for a full tensor.
        """
        local = rows - self.offset
        foreign = torch.zeros_like(rows, dtype=torch.bool)
        if self.ranks.rank > 0:
            foreign |= local < 0
        if self.ranks.rank < self.ranks.size - 1:
            foreign |= local >= self.local_length
        return local.masked_fill(foreign, 0), foreign


def _full_stride(local: Tensor, dim: int, length: int) -> tuple[int, ...]:
    """The strides of the full tensor that ``local`` shards: strides beyond the sharded dim grow with it."""
    inner = local.stride(dim)
    block = inner * local.shape[dim]
    return tuple(
        stride // block * inner * length if k != dim and block and stride >= block else stride
        for k, stride in enumerate(local.stride())
    )


@dataclass
class _Memory:
    """The state that all shards share that are views of one tensor."""

    writes: int = 0  # how often one of them was written
    # full tensors that user code has views of, each with its local shard and the sharded dim. Writes to the full tensor
    # are copied to the shard before that is used, and the other way round.
    exposed: list[tuple[Tensor, Tensor, int]] = field(default_factory=list)


class VocabularyShard(ShardedTensorBase):
    """A tensor of the full shape that holds this rank's rows of the vocabulary."""

    cut_dim: int  # the dim that is sharded
    vocabulary: Vocabulary  # the ranges of rows
    sums: Tensor | None  # sums along the sharded dim of the full tensor, where they are available without communication
    _local: Tensor
    _memory: _Memory
    _gathered: tuple[Tensor, int] | None

    @staticmethod
    def __new__(
        cls,
        local: Tensor,
        dim: int,
        vocabulary: Vocabulary,
        memory: _Memory | None = None,
    ) -> VocabularyShard:
        """Wraps this rank's rows along ``dim``; ``memory`` belongs to the shard that this one is a view of."""
        made: VocabularyShard = torch.Tensor._make_wrapper_subclass(
            cls,
            (*local.shape[:dim], vocabulary.length, *local.shape[dim + 1 :]),
            strides=_full_stride(local, dim, vocabulary.length),
            dtype=local.dtype,
            device=local.device,
        )
        made._local = local
        made.cut_dim = dim
        made.vocabulary = vocabulary
        made.sums = None
        made._memory = _Memory() if memory is None else memory
        made._gathered = None
        return made

    @property
    def local(self) -> Tensor:
        """This rank's rows: of the full shape, but with ``local_length`` rows along ``cut_dim``."""
        exposed = self._memory.exposed
        for full, local, dim in exposed:
            written = self.vocabulary.local_rows(full, dim)
            if len(exposed) == 1:
                local.copy_(written)
            elif not torch.equal(written, local):
                raise RuntimeError(
                    f"a tensor whose {self.vocabulary.length} entries of the vocabulary are sharded over"
                    f" {self.vocabulary.ranks.size} tensor ranks was written through one of several views that slice"
                    " the vocabulary (logits[..., a:b].fill_(x)), and the other views would keep the old values; write"
                    " logits[..., a:b] = x instead"
                )
        return self._local

    @property
    def from_right(self) -> int:
        """The sharded dim counted from the end, below zero."""
        return self.cut_dim - self._local.dim()

    def view_of(self, local: Tensor, dim: int | None = None) -> VocabularyShard:
        """A shard that shares this one's memory; ``local`` has any shape with ``local_length`` rows along ``dim``."""
        return type(self)(local, self.cut_dim if dim is None else dim, self.vocabulary, self._memory)

    def like(self, local: Tensor, dim: int | None = None) -> VocabularyShard:
        """A shard in memory of its own; ``local`` has any shape with ``local_length`` rows along ``dim``."""
        return type(self)(local, self.cut_dim if dim is None else dim, self.vocabulary)

    def gathered(self) -> Tensor:
        """All-gathers the full shape, without its autograd history; collective. It must not be written."""
        local = self.local
        memory = self._memory
        exposed = next((full for full, shard, _ in memory.exposed if shard is self._local), None)
        if exposed is not None:
            return exposed
        if self._gathered is None or self._gathered[1] != memory.writes or memory.exposed:
            self._gathered = self._joined(local, self.cut_dim), memory.writes
        return self._gathered[0]

    def _joined(self, local: Tensor, dim: int) -> Tensor:
        self.vocabulary.num_gathers += 1
        return self.vocabulary.joined(local, dim)

    def exposed(self) -> Tensor:
        """The full shape as ``gathered``, for views that user code gets and might write."""
        full = self.gathered()
        if not any(full is other for other, _, _ in self._memory.exposed):
            self._memory.exposed.append((full, self._local, self.cut_dim))
            self._gathered = None
        return full

    def take_full(self) -> Tensor:
        """A tensor of the full shape that the caller owns."""
        full = self.gathered()
        if self._gathered is None:
            return full.clone()
        self._gathered = None
        return full

    def mark_written(self) -> None:
        """Invalidates cached sums and full tensors after a write to the local rows."""
        self._memory.writes += 1
        self.sums = None
        for full, local, dim in self._memory.exposed:
            full.copy_(self._joined(local, dim))

    def has_same_rows(self, other: Any) -> bool:
        """Whether the other is a shard of the same rows, along the same dim counted from the end."""
        return (
            isinstance(other, VocabularyShard)
            and other.vocabulary.length == self.vocabulary.length
            and other.from_right == self.from_right
        )
