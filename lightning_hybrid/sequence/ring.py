"""Ring attention (Liu et al. 2023, sections 3 and 4): keys and values are passed around the context ranks.

Each rank has the queries, keys and values of its positions. In each of n steps on n ranks it attends from its queries
to one block of keys, merges the result into that of the blocks before, and passes the block to the next rank:

    step 0   rank 0: keys 0    rank 1: keys 1    rank 2: keys 2
    step 1   rank 0: keys 2    rank 1: keys 0    rank 2: keys 1
    step 2   rank 0: keys 1    rank 1: keys 2    rank 2: keys 0

A block is sent while its rank attends to it. A rank has two blocks of keys at most, so the number of heads does not
limit the number of ranks. The backward makes the weights of each block again from the saved log-sum-exp; the gradients
of a block are passed on with it, and return to the rank that has its positions. Under a causal mask positions are
attended from in an order that gives all ranks the same work (`balanced_order`; Brandon et al. 2023 show the imbalance
of the contiguous one).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_hybrid.collectives.tensors import LinearMap
from lightning_hybrid.errors import CannotShard
from lightning_hybrid.sequence.kernels import Scores, kernel_for, merge_block
from lightning_hybrid.sequence.order import (
    Block,
    RingOrder,
    from_ring_order,
    to_ring_order,
    with_positions,
)
from lightning_hybrid.sequence.positions import SequenceSharding, local_positions
from lightning_hybrid.tensor.collectives import Arriving, Ranks, enter


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sharding: SequenceSharding,
    *,
    masks: Sequence[Tensor] = (),
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Attends from this rank's positions to all ranks' positions; collective, forward and backward.

    Tensors are ``(batch, heads, local positions, features of a head)``, or without a batch; keys may have a divisor of
    the number of heads, and values other features. Masks are those of torch's attention: boolean, True where a query
    attends, or added to the scores; they broadcast to ``(batch, heads, all or local positions, all positions)``. With
    ``is_causal``, without masks, a query attends to keys up to its own position alone.

    Raises:
        CannotShard: The masks have other sizes, or cover only the keys of one rank.
    """
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if query.dim() == 3:
        q, k, v = (tensor.unsqueeze(0) for tensor in (query, key, value))
        return ring_attention(q, k, v, sharding, masks=masks, is_causal=is_causal, scale=scale).squeeze(0)
    if query.dim() != 4:
        raise CannotShard(
            f"ring attention takes (batch, heads, positions, features) and not {tuple(query.shape)}",
            entry="ring-attention",
        )
    if is_causal and masks:
        raise CannotShard("ring attention takes a mask or is_causal, not both", entry="ring-attention")
    if torch.is_autocast_enabled(query.device.type):  # as torch casts the arguments of its attention
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
    ranks, order = sharding.ranks, RingOrder(sharding.length, sharding.ranks.size, is_causal)
    mask = _merged([local_rows(mask, sharding) for mask in masks])
    query, key, value = _in_order(to_ring_order, from_ring_order, [query, key, value], order, ranks)
    with torch.autocast(query.device.type, enabled=False):
        out = _RingAttention.apply(query, key, value, mask, ranks, order, scale)
    [out] = _in_order(from_ring_order, to_ring_order, [out], order, ranks)
    return out


def local_rows(mask: Tensor, sharding: SequenceSharding) -> Tensor:
    """This rank's rows of a mask: ``(..., all or local queries, all keys)`` to ``(..., local queries, all keys)``.

    Either dim may be 1. The gradient of a mask, the same on all ranks, is that of all its rows.

    Raises:
        CannotShard: It has other sizes.
    """
    mask = mask.unsqueeze(0) if mask.dim() == 1 else mask
    local, length = sharding.local_length, sharding.length
    if mask.shape[-1] not in (1, length) or mask.shape[-2] not in (1, local, length):
        raise CannotShard(
            f"a mask of shape {tuple(mask.shape)} has not the {length} positions of all context ranks in its last dim,"
            f" and these or the {local} of this rank in the one before; make it for the full sequence, outside of the"
            " layer",
            entry="ring-attention",
        )
    if mask.shape[-2] == length:
        return local_positions(mask, SequenceSharding(mask.dim() - 2, length, sharding.ranks))
    return enter(mask, sharding.ranks) if mask.requires_grad and mask.shape[-2] == 1 else mask


def _merged(masks: list[Tensor]) -> Tensor | None:
    """One mask for several."""
    if not masks:
        return None
    merged, *others = masks
    for mask in others:
        merged = merged & mask if merged.dtype is mask.dtype is torch.bool else _addend(merged) + _addend(mask)
    return merged


def _addend(mask: Tensor) -> Tensor:
    if mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=torch.get_default_dtype()).masked_fill(~mask, -torch.inf)


def _in_order(run: Any, adjoint: Any, tensors: list[Tensor], order: RingOrder, ranks: Ranks) -> list[Tensor]:
    """Redistributes ``(batch, heads, positions, features)`` over the ranks, in one message where sizes permit."""
    if not order.is_causal:
        return tensors
    if len({(tensor.shape[-1], tensor.dtype) for tensor in tensors}) > 1:
        return [moved for tensor in tensors for moved in _in_order(run, adjoint, [tensor], order, ranks)]
    joined = torch.cat(tensors, 1) if len(tensors) > 1 else tensors[0]
    moved = LinearMap.apply(joined, lambda local: run(local, order, ranks), lambda local: adjoint(local, order, ranks))
    return list(moved.split([tensor.shape[1] for tensor in tensors], 1))


class _RingAttention(torch.autograd.Function):
    """Attention in the order of the ring; its gradients cannot be differentiated again."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        ranks: Ranks,
        order: RingOrder,
        scale: float,
    ) -> Tensor:
        """``(batch, heads, local positions, features)``."""
        repeats = query.shape[1] // key.shape[1]
        out, lse = None, None
        blocks = _Passed([key, value], order, ranks)
        for step in range(ranks.size):
            other = (ranks.rank - step) % ranks.size
            if step < ranks.size - 1:
                blocks.send(other)
            block = order.block(ranks.rank, other)
            k, v = (_repeated(tensor[:, :, block.keys], repeats) for tensor in blocks.tensors)
            scores = _scores(mask, order, other, block, scale)
            q = query[:, :, block.queries]
            found, found_lse = kernel_for(q, v, mask).forward(q, k, v, scores)
            if out is None or lse is None:  # the first block, of this rank, has all queries
                out, lse = found.to(found_lse.dtype), found_lse.clone()
            else:
                merge_block(out[:, :, block.queries], lse[:, :, block.queries], found, found_lse)
            blocks.receive()
        assert out is not None and lse is not None
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, mask, out, lse)
        ctx.given = ranks, order, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of queries, keys, values and mask, in their shapes."""
        query, key, value, mask, out, lse = ctx.saved_tensors
        ranks, order, scale = ctx.given
        repeats = query.shape[1] // key.shape[1]
        wide = lse.dtype
        grad_query = torch.zeros_like(query, dtype=wide)
        grad_mask = torch.zeros_like(mask, dtype=wide) if ctx.needs_input_grad[3] else None
        blocks = _Passed([key, value], order, ranks)
        grads, own = _Passed([], order, ranks), list[Tensor]()
        for step in range(ranks.size):
            other = (ranks.rank - step) % ranks.size
            if step < ranks.size - 1:
                blocks.send(other)
            block = order.block(ranks.rank, other)
            k, v = (_repeated(tensor[:, :, block.keys], repeats) for tensor in blocks.tensors)
            q, g, o = (tensor[:, :, block.queries] for tensor in (query, grad, out))
            scores = replace(_scores(mask, order, other, block, scale), mask_needs_grad=grad_mask is not None)
            kernel = kernel_for(q, v, mask)
            grad_q, grad_k, grad_v, addend = kernel.backward(g, q, k, v, o, lse[:, :, block.queries], scores)
            grad_query[:, :, block.queries] += grad_q
            if grad_mask is not None and addend is not None:
                _columns(grad_mask, order, other).add_(addend)
            found = [_summed(each.to(wide), repeats) for each in (grad_k, grad_v)]
            if step == 0:  # of this rank's positions: they stay here
                own = found
            else:
                grads.receive()
                if step == 1:
                    zeros = [torch.zeros_like(tensor, dtype=wide) for tensor in blocks.tensors]
                    grads = _Passed(zeros, order, ranks)
                for total, each in zip(grads.tensors, found, strict=True):
                    total[:, :, block.keys] += each
                grads.send(other)  # after the last step to the rank of its positions
            blocks.receive()
        grads.receive()
        for total, each in zip(own, grads.tensors, strict=ranks.size > 1):
            total += each
        grad_key, grad_value = (total.to(key.dtype) for total in own)
        grad_mask = None if grad_mask is None else grad_mask.to(mask.dtype)
        return grad_query.to(query.dtype), grad_key, grad_value, grad_mask, None, None, None


class _Passed:
    """Tensors of one rank's positions that go around the ring in one message: keys and values, or their gradients.

    Attributes:
        tensors: Those that this rank has now, ``(batch, heads, positions, features)``.
    """

    def __init__(self, tensors: list[Tensor], order: RingOrder, ranks: Ranks) -> None:
        self._order, self._ranks = order, ranks
        self._arriving: list[tuple[Arriving, list[torch.Size]]] = []  # one at most
        if ranks.size > 1 and tensors:
            self._hold(torch.cat([tensor.reshape(-1) for tensor in tensors]), [tensor.shape for tensor in tensors])
        else:
            self.tensors = tensors

    def _hold(self, flat: Tensor, shapes: list[torch.Size]) -> None:
        self._flat, pieces = flat, flat.split([shape.numel() for shape in shapes])
        self.tensors = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]

    def send(self, current: int) -> None:
        """Begins to send the tensors, of the positions of rank ``current``, to the next rank, which only reads them."""
        length = self._order.num_positions((current - 1) % self._ranks.size)
        shapes = [with_positions(tensor, length) for tensor in self.tensors]
        self._arriving.append((self._ranks.shift(self._flat, sum(shape.numel() for shape in shapes)), shapes))

    def receive(self) -> None:
        """Puts what the rank before has sent since, if anything, in their place."""
        while self._arriving:
            arriving, shapes = self._arriving.pop()
            self._hold(arriving.wait(), shapes)


def _scores(mask: Tensor | None, order: RingOrder, other: int, block: Block, scale: float) -> Scores:
    return Scores(scale, block.is_causal, None if mask is None else _columns(mask, order, other))


def _columns(mask: Tensor, order: RingOrder, other: int) -> Tensor:
    """A view of the columns of a mask for the keys of a rank."""
    if mask.shape[-1] == 1:
        return mask
    [(start, stop)] = order.ranges(other)
    return mask[..., start:stop]


def _repeated(tensor: Tensor, repeats: int) -> Tensor:
    """Each head of keys or values for all heads of its queries."""
    return tensor if repeats == 1 else tensor.repeat_interleave(repeats, 1)


def _summed(grad: Tensor, repeats: int) -> Tensor:
    """The adjoint of `_repeated`."""
    return grad if repeats == 1 else grad.unflatten(1, (-1, repeats)).sum(2)
