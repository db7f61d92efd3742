"""Collectives of tensor ranks with their gradients: all-reduce, all-gather, and the groups that share a layer.

Two of them bound a region (the operations between a column-parallel linear and its row-parallel one, in which each rank
holds other features); they are Megatron's f and g:

    enter   forward: identity       backward: all-reduce (each rank has the gradient of its features alone)
    leave   forward: all-reduce     backward: identity

They are each other's derivative, so that gradients can be differentiated again.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.parts.placement import Shard, embed_in_zeros, join, padded, shard_tensor
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
        """Sum a contiguous tensor over the ranks, in place."""

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
        """Sum a contiguous tensor over the ranks, in place."""
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
        """Leaves the tensor as it is."""

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensor of this rank alone."""
        return [tensor]

    def exchange(self, blocks: list[Tensor], shapes: list[torch.Size]) -> list[Tensor]:
        """The block of this rank alone."""
        return blocks


class PairedRanks:
    """The ranks of two axes together: `rank = outer rank * inner size + inner rank`."""

    def __init__(self, outer: Ranks, inner: Ranks) -> None:
        """Combines the ranks of an outer and an inner axis."""
        self._outer, self._inner = outer, inner
        self.rank, self.size = outer.rank * inner.size + inner.rank, outer.size * inner.size

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum a contiguous tensor over the ranks of both axes, in place."""
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


@dataclass
class Readers:
    """The readers of a value that has entered a region.

    Attributes:
        fresh: Each allocates a new tensor for its gradient, as products with weights do: it can be summed in place.
    """

    fresh: bool = False


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: Ranks, readers: Readers) -> Tensor:
        ctx.ranks, ctx.readers = ranks, readers
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if not ctx.readers.fresh or torch.is_grad_enabled():
            # The gradient that autograd passes in may be in use elsewhere too.
            grad = grad.clone(memory_format=torch.contiguous_format)
        return _Leave.apply(grad.contiguous(), ctx.ranks), None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        ctx.mark_dirty(tensor)
        ranks.all_reduce(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Enter.apply(grad, ctx.ranks, Readers()), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, ranks: Ranks) -> Tensor:
        ctx.dim, ctx.ranks = dim, ranks
        return torch.cat(ranks.all_gather(tensor), dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _LocalChunk.apply(grad, ctx.dim, ctx.ranks), None, None


class _LocalChunk(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, ranks: Ranks) -> Tensor:
        ctx.dim, ctx.ranks = dim, ranks
        return tensor.chunk(ranks.size, dim)[ranks.rank].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Gather.apply(grad, ctx.dim, ctx.ranks), None, None


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ranks: Ranks, placements: tuple[Shard | None, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.ranks, ctx.placements = ranks, placements
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ranks = ctx.ranks
        full = [
            grad if placement is None else embed_in_zeros(grad, placement, ranks.rank, ranks.size)
            for grad, placement in zip(grads, ctx.placements, strict=True)
        ]
        # One message for all of them: they are small.
        flat = _Leave.apply(torch.cat([grad.reshape(-1) for grad in full]), ranks)
        sums = [total.view_as(grad) for total, grad in zip(flat.split([g.numel() for g in full]), full, strict=True)]
        return (
            None,
            None,
            *(
                total if placement is None else shard_tensor(total, placement, ranks.rank, ranks.size)
                for total, placement in zip(sums, ctx.placements, strict=True)
            ),
        )


def enter(tensor: Tensor, ranks: Ranks, readers: Readers | None = None) -> Tensor:
    """Lets a replicated value enter a region: its gradient is summed over the ranks.

    Args:
        tensor: The value, equal on all ranks, of any shape.
        ranks: The tensor ranks.
        readers: The operations in the region that read it, complete when the forward ends; any by default.
    """
    return tensor if ranks.size == 1 else _Enter.apply(tensor, ranks, readers or Readers())


def leave(tensor: Tensor, ranks: Ranks) -> Tensor:
    """Sums the ranks' addends, in place: the result is a replicated value of their shape."""
    return tensor if ranks.size == 1 else _Leave.apply(tensor.contiguous(), ranks)


def gather(tensor: Tensor, dim: int, ranks: Ranks) -> Tensor:
    """All-gathers the ranks' features along ``dim``, in the order of ranks: the result is a replicated value."""
    return tensor if ranks.size == 1 else _Gather.apply(tensor, dim, ranks)


def sum_gradients(tensors: list[Tensor], placements: list[Shard | None], ranks: Ranks) -> list[Tensor]:
    """Sums the gradients of parameters that ranks hold in common and use on different features, in one message.

    Args:
        tensors: The parameters, or this rank's shards of them.
        placements: For each, how it is sharded (shards that ranks repeat are summed), or None for a replicated one.
        ranks: The tensor ranks.
    """
    return list(_SumGradients.apply(ranks, tuple(placements), *tensors))


def local_shard(full: Tensor, placement: Shard, ranks: Ranks) -> Tensor:
    """This rank's shard of a full tensor that all ranks have; its gradient is the full one on each of them.

    Args:
        full: The same on every rank, of any shape that the placement cuts.
        placement: How it is sharded.
        ranks: The ranks that hold the shards.
    """
    shard: Tensor = _LocalShard.apply(full, placement, ranks)
    return shard


class _LocalShard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, full: Tensor, placement: Shard, ranks: Ranks) -> Tensor:
        ctx.placement, ctx.ranks = placement, ranks
        return shard_tensor(full, placement, ranks.rank, ranks.size)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        message = padded(gradients[0], ctx.placement).contiguous()
        return join(ctx.ranks.all_gather(message), ctx.placement), None, None
