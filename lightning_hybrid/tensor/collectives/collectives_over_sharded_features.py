"""Collectives over sharded features, with their gradients.

Two of them bound a region (the operations between a column-parallel linear and its row-parallel one, in which each rank
holds other features); they are Megatron's f and g:

    enter   forward: identity       backward: all-reduce (each rank has the gradient of its features alone)
    leave   forward: all-reduce     backward: identity

They are each other's derivative, so that gradients can be differentiated again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.params.placement import Shard, embed_in_zeros, join, padded, shard_tensor
from lightning_hybrid.tensor.collectives.collectives_over_rank_groups import Ranks

Map = Callable[[Tensor], Tensor]


class LinearMap(torch.autograd.Function):
    """Applies a linear map; the backward applies its adjoint, so that gradients can be differentiated again."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, run: Map, adjoint: Map) -> Tensor:
        """The result of the map, whose shape may differ."""
        ctx.maps = adjoint, run
        return run(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """The gradient, of the shape of the input."""
        return LinearMap.apply(grad, *ctx.maps), None, None


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
        """A view of the same shape."""
        ctx.ranks, ctx.readers = ranks, readers
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """The sum over the ranks, of the same shape."""
        if not ctx.readers.fresh or torch.is_grad_enabled():
            # The gradient that autograd passes in may be in use elsewhere too.
            grad = grad.clone(memory_format=torch.contiguous_format)
        return _Leave.apply(grad.contiguous(), ctx.ranks), None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: Ranks) -> Tensor:
        """The sum over the ranks, in the memory of ``tensor``, which may have any shape."""
        ctx.ranks = ranks
        ctx.mark_dirty(tensor)
        ranks.all_reduce(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The gradient, of the same shape."""
        return _Enter.apply(grad, ctx.ranks, Readers()), None


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ranks: Ranks, placements: tuple[Shard | None, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        """Views of the same shapes."""
        ctx.ranks, ctx.placements = ranks, placements
        ctx.set_materialize_grads(False)
        ctx.made = tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in tensors)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """The sums, of the same shapes; None for a parameter that no rank has used, which optimizers leave alone."""
        ranks = ctx.ranks
        full = []
        for grad, placement, (shape, dtype, device) in zip(grads, ctx.placements, ctx.made, strict=True):
            own = torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad
            full.append(own if placement is None else embed_in_zeros(own, placement, ranks.rank, ranks.size))
        used = full[0].new_ones(len(full))
        for index, grad in enumerate(grads):
            if grad is None:
                used[index] = 0
        # One message for all of them: they are small.
        flat = _Leave.apply(torch.cat([*(grad.reshape(-1) for grad in full), used]), ranks)
        *sums, users = flat.split([*(grad.numel() for grad in full), len(full)])
        totals: list[Tensor | None] = []
        for total, like, grad, placement, count in zip(sums, full, grads, ctx.placements, users, strict=True):
            if grad is None and not count:  # read only where this rank has not used it
                totals.append(None)
                continue
            whole = total.view_as(like)
            totals.append(whole if placement is None else shard_tensor(whole, placement, ranks.rank, ranks.size))
        return None, None, *totals


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
    """All-gathers the ranks' features along ``dim``, in the order of ranks: the result is a replicated value.

    Args:
        tensor: This rank's features, of one shape on all ranks.
        dim: The dim of the features; the result has ``ranks.size`` times as many.
        ranks: The tensor ranks.
    """
    if ranks.size == 1:
        return tensor
    return LinearMap.apply(
        tensor,
        lambda local: torch.cat(ranks.all_gather(local), dim),
        lambda full: full.chunk(ranks.size, dim)[ranks.rank].contiguous(),
    )


def sum_gradients(tensors: list[Tensor], placements: list[Shard | None], ranks: Ranks) -> list[Tensor]:
    """Sums the gradients of parameters that ranks hold in common and use on different features, in one message.

    Args:
        tensors: The parameters, or this rank's shards of them; the results have their shapes.
        placements: For each, how it is sharded (shards that ranks repeat are summed), or None for a replicated one.
        ranks: The tensor ranks.
    """
    with torch._C.DisableTorchFunctionSubclass():  # experts that other ranks share refuse reads of user code
        return list(_SumGradients.apply(ranks, tuple(placements), *tensors))


def local_shard(full: Tensor, placement: Shard, ranks: Ranks) -> Tensor:
    """This rank's shard of a full tensor that all ranks have; its gradient is the full one on each of them.

    Args:
        full: The same on every rank, of any shape that the placement cuts.
        placement: How it is sharded.
        ranks: The ranks that hold the shards.
    """
    return LinearMap.apply(
        full,
        lambda full: shard_tensor(full, placement, ranks.rank, ranks.size),
        lambda local: join(ranks.all_gather(padded(local, placement).contiguous()), placement),
    )
