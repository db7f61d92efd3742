"""The vocabulary shard of a rank, and the group of the others.

The data alone: what operations do to it is said in ``op_rules`` and ``sharded_losses``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.parts.placement import Shard, join, padded
from lightning_hybrid.step.standins.deferred_tensors import Deferred
from lightning_hybrid.tensor.collectives.rank_collectives import Ranks


class Vocabulary:
    """The rows of a vocabulary that each rank holds.

    Attributes:
        length: Of the whole.
        offset: The first row of this rank.
        local_length: Its number of rows.
        ranks: Who holds the others.
        num_gathers: How often a whole was asked for, on this rank.
    """

    def __init__(self, length: int, ranks: Ranks) -> None:
        """Args: length: of the whole. ranks: that share it, the last one with fewer rows if need be."""
        self.length, self.ranks = length, ranks
        ((self.offset, self.local_length),) = self.shard(0).ranges(ranks.rank, ranks.size)
        self.num_gathers = 0

    def shard(self, dim: int) -> Shard:
        """The placement of a tensor that is cut along ``dim``."""
        return Shard.unevenly(dim, self.length, self.ranks.size)

    def own(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's part of a whole, as a view."""
        return whole.narrow(dim, self.offset, self.local_length)

    def summed(self, addend: Tensor) -> Tensor:
        """The sum over the ranks, in the memory of the addend if that is dense."""
        addend = addend.contiguous()
        self.ranks.all_reduce(addend)
        return addend

    def located(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Where rows of the whole lie here, and which of them do not; those are 0.

        What is no row of any rank stays out of range on the first or on the last one, so that whoever looks it up there
        raises as it does for a whole.
        """
        local = rows - self.offset
        foreign = torch.zeros_like(rows, dtype=torch.bool)
        if self.ranks.rank > 0:
            foreign |= local < 0
        if self.ranks.rank < self.ranks.size - 1:
            foreign |= local >= self.local_length
        return local.masked_fill(foreign, 0), foreign


def whole_shape(local: Tensor, dim: int, length: int) -> tuple[int, ...]:
    """The shape of the whole."""
    return (*local.shape[:dim], length, *local.shape[dim + 1 :])


def _full_stride(local: Tensor, dim: int, length: int) -> tuple[int, ...]:
    """The strides of a whole whose part has these: what steps over the cut dim steps over more."""
    inner = local.stride(dim)
    block = inner * local.shape[dim]
    return tuple(
        stride // block * inner * length if k != dim and block and stride >= block else stride
        for k, stride in enumerate(local.stride())
    )


@dataclass
class _Memory:
    """What slices know together that are views of one tensor.

    Attributes:
        writes: How often one of them was written.
        exposed: Wholes that the user's code has views of, each with the part that it stands for and the dim of that.
            What is written to a whole is written to the part before that is used, and the other way round.
    """

    writes: int = 0
    exposed: list[tuple[Tensor, Tensor, int]] = field(default_factory=list)


class Slice(Deferred):
    """A rank's part along the vocabulary of a tensor that says it is the whole.

    Attributes:
        cut_dim: The dim that is cut.
        vocabulary: How.
        sums: Along the cut dim of the whole, where they are known without asking the others.
    """

    cut_dim: int
    vocabulary: Vocabulary
    sums: Tensor | None
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
    ) -> Slice:
        """Args: local: this rank's part. dim: which is cut. memory: of the slice that this one is a view of."""
        made: Slice = torch.Tensor._make_wrapper_subclass(
            cls,
            whole_shape(local, dim, vocabulary.length),
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
        """What this rank holds."""
        exposed = self._memory.exposed
        for whole, part, dim in exposed:
            own = self.vocabulary.own(whole, dim)
            if len(exposed) == 1:
                part.copy_(own)
            elif not torch.equal(own, part):
                raise RuntimeError(
                    f"a tensor that {self.vocabulary.ranks.size} tensor ranks share by its"
                    f" {self.vocabulary.length} rows of the vocabulary was written through one of several views that"
                    " cut the vocabulary (logits[..., a:b].fill_(x)), and the others cannot see it; write"
                    " logits[..., a:b] = x instead"
                )
        return self._local

    @property
    def from_right(self) -> int:
        """The cut dim counted from the end, below zero."""
        return self.cut_dim - self._local.dim()

    def view_of(self, local: Tensor, dim: int | None = None) -> Slice:
        """A slice that shares this one's memory."""
        return type(self)(local, self.cut_dim if dim is None else dim, self.vocabulary, self._memory)

    def like(self, local: Tensor, dim: int | None = None) -> Slice:
        """A slice of its own with the same rows."""
        return type(self)(local, self.cut_dim if dim is None else dim, self.vocabulary)

    def gathered(self) -> Tensor:
        """The whole, without its history; collective. It must not be written."""
        local = self.local
        memory = self._memory
        known = next((whole for whole, part, _ in memory.exposed if part is self._local), None)
        if known is not None:
            return known
        if self._gathered is None or self._gathered[1] != memory.writes or memory.exposed:
            self._gathered = self._joined(local, self.cut_dim), memory.writes
        return self._gathered[0]

    def _joined(self, local: Tensor, dim: int) -> Tensor:
        placement = self.vocabulary.shard(dim)
        self.vocabulary.num_gathers += 1
        return join(self.vocabulary.ranks.all_gather(padded(local.detach(), placement).contiguous()), placement)

    def exposed(self) -> Tensor:
        """As ``gathered``, for views that the user's code gets and might write."""
        whole = self.gathered()
        if not any(whole is known for known, _, _ in self._memory.exposed):
            self._memory.exposed.append((whole, self._local, self.cut_dim))
            self._gathered = None
        return whole

    def take_full(self) -> Tensor:
        """A whole that belongs to who asked for it."""
        whole = self.gathered()
        if self._gathered is None:
            return whole.clone()
        self._gathered = None
        return whole

    def written(self) -> None:
        """Its part was written: what was known of it does not hold any more."""
        self._memory.writes += 1
        self.sums = None
        for whole, part, dim in self._memory.exposed:
            whole.copy_(self._joined(part, dim))

    def has_same_rows(self, other: Any) -> bool:
        """Whether the same rows are held along the same dim counted from the end."""
        return (
            isinstance(other, Slice)
            and other.vocabulary.length == self.vocabulary.length
            and other.from_right == self.from_right
        )
