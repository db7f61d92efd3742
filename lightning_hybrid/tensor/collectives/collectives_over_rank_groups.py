"""Groups of ranks that a layer is sharded over, as one of them sees it: all-reduce, all-gather, all-to-all."""

from __future__ import annotations

from math import prod
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.shared_memory.collectives import shared_memory


class Ranks(Protocol):
    """The ranks that a layer is sharded over, as seen by one of them.

    Attributes:
        rank: The number of this rank among them.
        size: The number of ranks.
    """

    rank: int
    size: int

    def all_reduce(self, tensor: Tensor) -> None:
        """Sums a contiguous tensor of any shape over the ranks, in place."""

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, in their order; all have one shape."""


class ExchangingRanks(Ranks, Protocol):
    """Ranks that a sequence may be sharded over."""

    def exchange(self, blocks: list[Tensor], shapes: list[torch.Size], /) -> list[Tensor]:
        """All-to-all: sends one block to each rank; returns the block from each rank, in these shapes."""


class GroupRanks:
    """The ranks of a process group: through shared memory where they are on one host, else by its collectives."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Sets up shared memory, which is collective for the first object of a group."""
        self.group = group
        self._memory = shared_memory(group)
        self.rank = group.rank()
        self.size = group.size()

    def all_reduce(self, tensor: Tensor) -> None:
        """Sums a contiguous tensor of any shape over the ranks, in place."""
        if self._memory is not None:
            self._memory.all_reduce(_as_real(tensor))
        else:
            dist.all_reduce(_as_real(tensor), group=self.group)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, in their order; all have one shape."""
        if self._memory is not None:
            return self._memory.all_gather(tensor.contiguous())
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather([_as_real(block) for block in gathered], _as_real(tensor.contiguous()), group=self.group)
        return gathered

    def exchange(self, blocks: list[Tensor], shapes: list[torch.Size]) -> list[Tensor]:
        """All-to-all: sends one block to each rank; returns the block from each rank, in these shapes."""
        sent = [_as_real(block.contiguous()).reshape(-1) for block in blocks]
        real = [(*shape, 2) if blocks[0].is_complex() else tuple(shape) for shape in shapes]
        counts = [prod(shape) for shape in real]
        if self._memory is not None:
            received = self._memory.exchange(sent, counts)
        else:
            flat = sent[0].new_empty(sum(counts))
            dist.all_to_all_single(flat, torch.cat(sent), counts, [block.numel() for block in sent], group=self.group)
            received = list(flat.split(counts))
        found = [block.view(shape) for block, shape in zip(received, real, strict=True)]
        return [torch.view_as_complex(block) for block in found] if blocks[0].is_complex() else found


def as_ranks(group: dist.ProcessGroup | ExchangingRanks | None) -> ExchangingRanks:
    """The ranks of a group; a single rank for None."""
    if group is None:
        return OneRank()
    return GroupRanks(group) if isinstance(group, dist.ProcessGroup) else group


class OneRank:
    """A group of one rank: its collectives return their input."""

    rank, size = 0, 1

    def all_reduce(self, tensor: Tensor) -> None:
        """Leaves the tensor, of any shape, as it is."""

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensor of this rank alone, of any shape."""
        return [tensor]

    def exchange(self, blocks: list[Tensor], shapes: list[torch.Size]) -> list[Tensor]:
        """The block of this rank alone, of any shape."""
        return blocks


class PairedRanks:
    """The ranks of two axes together: `rank = outer rank * inner size + inner rank`."""

    def __init__(self, outer: Ranks, inner: Ranks) -> None:
        self._outer, self._inner = outer, inner
        self.rank, self.size = outer.rank * inner.size + inner.rank, outer.size * inner.size

    def all_reduce(self, tensor: Tensor) -> None:
        """Sums a contiguous tensor of any shape over the ranks of both axes, in place."""
        self._inner.all_reduce(tensor)
        self._outer.all_reduce(tensor)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, in their order; all have one shape."""
        of_inner = torch.stack(self._inner.all_gather(tensor))
        return [block for blocks in self._outer.all_gather(of_inner) for block in blocks.unbind()]


def paired(outer: Ranks, inner: Ranks) -> Ranks:
    """The ranks of two axes together; the ranks of one axis where the other has a single rank."""
    if inner.size == 1:
        return outer
    return inner if outer.size == 1 else PairedRanks(outer, inner)


def _as_real(tensor: Tensor) -> Tensor:
    """A view as real numbers: gloo supports no complex ones."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
