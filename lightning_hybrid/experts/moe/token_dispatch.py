"""From tokens to rows sorted by expert, and back.

Rows are gathered, by the place of each pair (token, expert) in the order of experts; no tensor over tokens x experts x
capacity is made. Where each token has as many rows as any other, the way back is a gather too, forward and backward, so
sums have one order on every device.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

DropBy: TypeAlias = Literal["position", "weight"]


class Dispatch(NamedTuple):
    """Which row is which pair. P rows, T tokens, E experts.

    Attributes:
        tokens: [P] the token of each row; rows are sorted by expert.
        weights: [P] what results are multiplied with; takes gradients.
        counts: [E] int64: rows of each expert, P in all.
        places: [T, k] the rows of each token, if each has k of them and no row is another's; None otherwise.
        dropped: [] floating point: pairs without a row.
    """

    tokens: Tensor
    weights: Tensor
    counts: Tensor
    places: Tensor | None
    dropped: Tensor


def all_pairs(experts: Tensor, weights: Tensor, counts: Tensor) -> Dispatch:
    """A row for each pair.

    Args:
        experts: [T, k].
        weights: [T, k].
        counts: [E] pairs of each expert.
    """
    top_k = experts.shape[1]
    order = experts.flatten().argsort(stable=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    tokens = order // top_k
    rows_weights = weights.flatten().index_select(0, order)
    return Dispatch(tokens, rows_weights, counts, places.view_as(experts), weights.new_zeros(()))


def with_capacity(
    experts: Tensor, weights: Tensor, counts: Tensor, capacity: int, *, drop_by: DropBy, pad: bool
) -> Dispatch:
    """At most ``capacity`` rows for each expert.

    Args:
        experts: [T, k], most wanted first.
        weights: [T, k].
        counts: [E] pairs of each expert.
        capacity: C.
        drop_by: Who keeps a place: "position", the first choices of all tokens in their order, then the second choices
            (GShard); "weight", the pairs of largest weight.
        pad: Exactly C rows for each expert, so that no shape depends on contents; those that nobody asked for are
            copies of some token's, with weight 0.
    """
    num_tokens, num_experts = experts.shape[0], counts.shape[0]
    # Pairs in the order of their rank for a place: choice by choice, so that pair number p is of token p % T.
    by_rank, weight_by_rank = experts.t().flatten(), weights.t().flatten()
    rank = None
    if drop_by == "weight":
        rank = weight_by_rank.detach().argsort(descending=True, stable=True)
        by_rank = by_rank.index_select(0, rank)
    order = by_rank.argsort(stable=True)
    sorted_experts = by_rank.index_select(0, order)
    if rank is not None:
        order = rank.index_select(0, order)
    begins = counts.cumsum(0) - counts
    positions = torch.arange(order.shape[0], device=order.device) - begins.index_select(0, sorted_experts)
    fits = positions < capacity
    dropped = (counts - capacity).clamp_min(0).sum().to(weights.dtype)
    if not pad:
        order = order.masked_select(fits)
        kept = counts.clamp_max(capacity)
        return Dispatch(order % max(num_tokens, 1), weight_by_rank.index_select(0, order), kept, None, dropped)
    # A place that nobody has asked for holds pair 0; the last place is for all pairs that are dropped.
    num_places = num_experts * capacity
    place = torch.where(fits, sorted_experts * capacity + positions, num_places)
    pairs = order.new_zeros(num_places + 1).scatter_(0, place, order)[:num_places]
    is_asked = fits.new_zeros(num_places + 1).scatter_(0, place, fits)[:num_places]
    row_weights = weight_by_rank.index_select(0, pairs).where(is_asked, 0.0)
    full = torch.full_like(counts, capacity)
    return Dispatch(pairs % max(num_tokens, 1), row_weights, full, None, dropped)


def of_experts(tokens: Tensor, weights: Tensor) -> Dispatch:
    """The rows that experts choose.

    Args:
        tokens: [E, C].
        weights: [E, C].
    """
    counts = torch.full((tokens.shape[0],), tokens.shape[1], dtype=torch.int64, device=tokens.device)
    return Dispatch(tokens.flatten(), weights.flatten(), counts, None, weights.new_zeros(()))


def take_rows(x: Tensor, dispatch: Dispatch) -> Tensor:
    """The rows: [T, D] -> [P, D]."""
    if dispatch.places is None:
        return x.index_select(0, dispatch.tokens)
    rows: Tensor = _TakeRows.apply(x, dispatch.tokens, dispatch.places)
    return rows


def combine(results: Tensor, dispatch: Dispatch, num_tokens: int) -> Tensor:
    """The weighted sum of each token's results: [P, D] -> [T, D]."""
    weights = dispatch.weights.to(results.dtype)
    if dispatch.places is None:
        y = results.new_zeros(num_tokens, results.shape[1])
        return y.index_add(0, dispatch.tokens, results * weights.unsqueeze(1))
    combined: Tensor = _Combine.apply(results, weights, dispatch.tokens, dispatch.places)
    return combined


def _sum_of(rows: Tensor, weights: Tensor | None, places: Tensor) -> Tensor:
    """For each token the (weighted) sum of its rows, in the order of its choices."""
    if not torch.is_grad_enabled():
        # Sums of gathered rows in one pass, whatever the rows mean.
        per_row = None if weights is None else weights.index_select(0, places.flatten()).view_as(places)
        return F.embedding_bag(places, rows, mode="sum", per_sample_weights=per_row)
    assert weights is None  # only a backward is differentiated, and it sums gradients
    return rows.index_select(0, places.flatten()).view(*places.shape, rows.shape[1]).sum(1)


class _TakeRows(torch.autograd.Function):
    """Gather rows; back, gather the gradients of each token and sum them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, places)
        return x.index_select(0, tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        _, places = ctx.saved_tensors
        return _sum_of(grad, None, places), None, None


class _Combine(torch.autograd.Function):
    """Gather the results of each token and sum them, weighted."""

    @staticmethod
    def forward(ctx: Any, results: Tensor, weights: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(results, weights, tokens)
        return _sum_of(results, weights, places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        results, weights, tokens = ctx.saved_tensors
        rows = grad.index_select(0, tokens)
        grad_weights = torch.linalg.vecdot(rows, results) if ctx.needs_input_grad[1] else None
        if torch.is_grad_enabled():  # the gradient is to be differentiated again
            return rows * weights.unsqueeze(1), grad_weights, None, None
        return rows.mul_(weights.unsqueeze(1)), grad_weights, None, None
