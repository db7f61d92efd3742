"""Dispatch and combination: rows of the experts are assigned to pairs (token, expert), gathered, and summed per token.

Rows are gathered by the index of each pair, in the order of experts; no tensor over tokens x experts x capacity is
made. If each token has k rows, the combination is a gather too, forward and backward, so sums have one order on every
device.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

DropBy: TypeAlias = Literal["position", "weight"]


class Dispatch(NamedTuple):
    """Assignment of rows to pairs (token, expert). P rows, T tokens, E experts."""

    tokens: Tensor  # [P] the token of each row; rows are sorted by expert
    weights: Tensor  # [P] factors of the results; differentiable
    counts: Tensor  # [E] int64: rows of each expert, P in all
    # [T, k] row indices of each token, if each token has k rows and each row one token; else None
    rows_of_token: Tensor | None
    dropped: Tensor  # [] floating point: number of pairs without a row


def dispatch_all_pairs(experts: Tensor, weights: Tensor, counts: Tensor) -> Dispatch:
    """Assigns a row to each pair (dropless): experts and weights of shape [T, k], and the counts [E] of pairs."""
    top_k = experts.shape[1]
    order = experts.flatten().argsort(stable=True)
    rows_of_token = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    tokens = order // top_k
    rows_weights = weights.flatten().index_select(0, order)
    return Dispatch(tokens, rows_weights, counts, rows_of_token.view_as(experts), weights.new_zeros(()))


def dispatch_with_capacity(
    experts: Tensor, weights: Tensor, counts: Tensor, capacity: int, *, drop_by: DropBy, pad: bool
) -> Dispatch:
    """Assigns at most ``capacity`` rows to each expert; experts by decreasing score and weights [T, k], counts [E].

    Pairs have priority by "position", the first choices of all tokens in their order, then the second choices (GShard);
    or by "weight", the largest. With ``pad`` each expert has exactly C rows, so that no shape depends on data; unused
    rows are copies of some token's, with weight 0.
    """
    num_tokens, num_experts = experts.shape[0], counts.shape[0]
    # Pairs in the order of their priority: choice by choice, so that pair number p is of token p % T.
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
        rows = counts.clamp_max(capacity)
        return Dispatch(order % max(num_tokens, 1), weight_by_rank.index_select(0, order), rows, None, dropped)
    # An unused slot contains pair 0; one additional slot at the end is for all dropped pairs.
    num_slots = num_experts * capacity
    slot = torch.where(fits, sorted_experts * capacity + positions, num_slots)
    pairs = order.new_zeros(num_slots + 1).scatter_(0, slot, order)[:num_slots]
    is_used = fits.new_zeros(num_slots + 1).scatter_(0, slot, fits)[:num_slots]
    row_weights = weight_by_rank.index_select(0, pairs).where(is_used, 0.0)
    full = torch.full_like(counts, capacity)
    return Dispatch(pairs % max(num_tokens, 1), row_weights, full, None, dropped)


def dispatch_expert_choice(tokens: Tensor, weights: Tensor) -> Dispatch:
    """Assigns the rows that experts choose (expert choice); ``tokens`` and ``weights`` are of shape [E, C]."""
    counts = torch.full((tokens.shape[0],), tokens.shape[1], dtype=torch.int64, device=tokens.device)
    return Dispatch(tokens.flatten(), weights.flatten(), counts, None, weights.new_zeros(()))


def gather_rows(x: Tensor, dispatch: Dispatch) -> Tensor:
    """Gathers the rows: shape [T, D] -> [P, D]."""
    if dispatch.rows_of_token is None:
        return x.index_select(0, dispatch.tokens)
    rows: Tensor = _GatherRows.apply(x, dispatch.tokens, dispatch.rows_of_token)
    return rows


def combine(results: Tensor, dispatch: Dispatch, num_tokens: int) -> Tensor:
    """Computes the weighted sum of each token's results: shape [P, D] -> [T, D]."""
    weights = dispatch.weights.to(results.dtype)
    if dispatch.rows_of_token is None:
        y = results.new_zeros(num_tokens, results.shape[1])
        return y.index_add(0, dispatch.tokens, results * weights.unsqueeze(1))
    combined: Tensor = _Combine.apply(results, weights, dispatch.tokens, dispatch.rows_of_token)
    return combined


def _sum_of(rows: Tensor, weights: Tensor | None, rows_of_token: Tensor) -> Tensor:
    """Computes the (weighted) sum of each token's rows in the order of its choices: [P, D] -> [T, D]."""
    if not torch.is_grad_enabled():
        # Gathers and sums the rows in one pass.
        per_row = None if weights is None else weights.index_select(0, rows_of_token.flatten()).view_as(rows_of_token)
        return F.embedding_bag(rows_of_token, rows, mode="sum", per_sample_weights=per_row)
    assert weights is None  # only the backward is differentiated again, and it sums gradients
    return rows.index_select(0, rows_of_token.flatten()).view(*rows_of_token.shape, rows.shape[1]).sum(1)


class _GatherRows(torch.autograd.Function):
    """Gathers rows; the backward gathers the gradients of each token and sums them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor, rows_of_token: Tensor) -> Tensor:
        """Of shape [T, D], tokens [P], rows_of_token [T, k] -> [P, D]."""
        ctx.save_for_backward(tokens, rows_of_token)
        return x.index_select(0, tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Of shape [P, D] -> [T, D]."""
        _, rows_of_token = ctx.saved_tensors
        return _sum_of(grad, None, rows_of_token), None, None


class _Combine(torch.autograd.Function):
    """Gathers the results of each token and computes their weighted sum."""

    @staticmethod
    def forward(ctx: Any, results: Tensor, weights: Tensor, tokens: Tensor, rows_of_token: Tensor) -> Tensor:
        """Of shape [P, D], weights and tokens [P], rows_of_token [T, k] -> [T, D]."""
        ctx.save_for_backward(results, weights, tokens)
        return _sum_of(results, weights, rows_of_token)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Of shape [T, D] -> [P, D] and [P]."""
        results, weights, tokens = ctx.saved_tensors
        rows = grad.index_select(0, tokens)
        grad_weights = torch.linalg.vecdot(rows, results) if ctx.needs_input_grad[1] else None
        if torch.is_grad_enabled():  # double backward
            return rows * weights.unsqueeze(1), grad_weights, None, None
        return rows.mul_(weights.unsqueeze(1)), grad_weights, None, None
