"""Collectives of tensor ranks with their gradients: all-reduce, all-gather, and the groups that share a layer.

The two that make a region (the operations between a column-parallel linear and its row-parallel one, in which each rank
holds other features):

    enter   forward: nothing             backward: sum over ranks (each rank has the gradient of its features alone)
    leave   forward: sum over ranks      backward: nothing

They are each other's derivative, so that gradients can be differentiated once more.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.parts.placement import Shard, cut, join, padded, spread
from lightning_hybrid.shared_memory.collectives import shared_memory


class Ranks(Protocol):
    """Ranks that share a layer, as one of them sees them.

    Attributes:
        rank: This one.
        size: How many there are.
    """

    rank: int
    size: int

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum a contiguous tensor over the ranks, in place."""

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, which have one shape."""


class ExchangingRanks(Ranks, Protocol):
    """Ranks to which positions may be dealt."""

    def exchange(self, parts: list[Tensor], shapes: list[torch.Size]) -> list[Tensor]:
        """Give each rank one of the parts; returns what each rank gave to this one, in these shapes."""


class GroupRanks:
    """The ranks of a process group: through memory where they can share it, else by the group's own collectives."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Collective where it is the first of its group: args: group: the ranks."""
        self.group = group
        self._memory = shared_memory(group)
        self.rank = group.rank()
        self.size = group.size()

    def all_reduce(self, tensor: Tensor) -> None:
        """See `Ranks`."""
        if self._memory is not None:
            self._memory.all_reduce(_real(tensor))
        else:
            dist.all_reduce(_real(tensor), group=self.group)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """See `Ranks`."""
        if self._memory is not None:
            return self._memory.all_gather(tensor.contiguous())
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather([_real(part) for part in gathered], _real(tensor.contiguous()), group=self.group)
        return gathered

    def exchange(self, parts: list[Tensor], shapes: list[torch.Size]) -> list[Tensor]:
        """See `ExchangingRanks`."""
        sent = [_real(part.contiguous()).reshape(-1) for part in parts]
        real = [(*shape, 2) if parts[0].is_complex() else tuple(shape) for shape in shapes]
        counts = [prod(shape) for shape in real]
        if self._memory is not None:
            received = self._memory.exchange(sent, counts)
        else:
            flat = sent[0].new_empty(sum(counts))
            dist.all_to_all_single(flat, torch.cat(sent), counts, [part.numel() for part in sent], group=self.group)
            received = list(flat.split(counts))
        found = [part.view(shape) for part, shape in zip(received, real, strict=True)]
        return [torch.view_as_complex(part) for part in found] if parts[0].is_complex() else found


def ranks_in(group: dist.ProcessGroup | ExchangingRanks | None) -> ExchangingRanks:
    """The ranks of a group; None stands for a rank alone."""
    if group is None:
        return OneRank()
    return GroupRanks(group) if isinstance(group, dist.ProcessGroup) else group


class OneRank:
    """A rank that shares nothing."""

    rank, size = 0, 1

    def all_reduce(self, tensor: Tensor) -> None:
        """See `Ranks`."""

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """See `Ranks`."""
        return [tensor]

    def exchange(self, parts: list[Tensor], shapes: list[torch.Size]) -> list[Tensor]:
        """See `ExchangingRanks`."""
        return parts


class PairedRanks:
    """The ranks of two axes together: `rank = outer rank * inner size + inner rank`."""

    def __init__(self, outer: Ranks, inner: Ranks) -> None:
        """Args: outer, inner: the axes."""
        self._outer, self._inner = outer, inner
        self.rank, self.size = outer.rank * inner.size + inner.rank, outer.size * inner.size

    def all_reduce(self, tensor: Tensor) -> None:
        """See `Ranks`."""
        self._inner.all_reduce(tensor)
        self._outer.all_reduce(tensor)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """See `Ranks`."""
        of_inner = torch.stack(self._inner.all_gather(tensor))
        return [part for parts in self._outer.all_gather(of_inner) for part in parts.unbind()]


def paired(outer: Ranks, inner: Ranks) -> Ranks:
    """The ranks of two axes together; those of one of them where the other has a single rank."""
    if inner.size == 1:
        return outer
    return inner if outer.size == 1 else PairedRanks(outer, inner)


def _real(tensor: Tensor) -> Tensor:
    """The same memory as real numbers: gloo knows no complex ones."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


@dataclass
class Readers:
    """What reads a value that has entered a region.

    Attributes:
        fresh: Each makes a new tensor for its gradient, as products with weights do: it can be summed where it lies.
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
            # The gradient that autograd hands over may be somebody else's too.
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
        return _Take.apply(grad, ctx.dim, ctx.ranks), None, None


class _Take(torch.autograd.Function):
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
        wholes = [
            grad if placement is None else spread(grad, placement, ranks.rank, ranks.size)
            for grad, placement in zip(grads, ctx.placements, strict=True)
        ]
        # One message for all of them: they are small.
        flat = _Leave.apply(torch.cat([whole.reshape(-1) for whole in wholes]), ranks)
        sums = [
            part.view_as(whole) for part, whole in zip(flat.split([w.numel() for w in wholes]), wholes, strict=True)
        ]
        return (
            None,
            None,
            *(
                total if placement is None else cut(total, placement, ranks.rank, ranks.size)
                for total, placement in zip(sums, ctx.placements, strict=True)
            ),
        )


def enter(tensor: Tensor, ranks: Ranks, readers: Readers | None = None) -> Tensor:
    """A replicated value on its way into a region.

    Args:
        tensor: The value.
        ranks: The tensor ranks.
        readers: Of it inside, as they are known when the forward ends; any by default.
    """
    return tensor if ranks.size == 1 else _Enter.apply(tensor, ranks, readers or Readers())


def leave(tensor: Tensor, ranks: Ranks) -> Tensor:
    """The sum of the ranks' addends, in place: a replicated value."""
    return tensor if ranks.size == 1 else _Leave.apply(tensor.contiguous(), ranks)


def gather(tensor: Tensor, dim: int, ranks: Ranks) -> Tensor:
    """The ranks' features one after the other: a replicated value."""
    return tensor if ranks.size == 1 else _Gather.apply(tensor, dim, ranks)


def sum_gradients(tensors: list[Tensor], placements: list[Shard | None], ranks: Ranks) -> list[Tensor]:
    """Parameters that several ranks hold and use on different features; their gradients are summed, in one message.

    Args:
        tensors: What this rank holds.
        placements: For each, how it is cut (parts that ranks share are summed), or None if all ranks hold it whole.
        ranks: The tensor ranks.
    """
    return list(_SumGradients.apply(ranks, tuple(placements), *tensors))


def local_part(full: Tensor, placement: Shard, ranks: Ranks) -> Tensor:
    """This rank's shard of a full tensor that all ranks have; its gradient is the full one on each of them.

    Args:
        full: The same on every rank, of any shape that the placement cuts.
        placement: Where the shards lie.
        ranks: That hold them.
    """
    shard: Tensor = _LocalPart.apply(full, placement, ranks)
    return shard


class _LocalPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, full: Tensor, placement: Shard, ranks: Ranks) -> Tensor:
        ctx.placement, ctx.ranks = placement, ranks
        return cut(full, placement, ranks.rank, ranks.size)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        message = padded(gradients[0], ctx.placement).contiguous()
        return join(ctx.ranks.all_gather(message), ctx.placement), None, None
