"""Gathers rows sorted by expert from tokens, and combines the experts' results per token.

Rows are gathered by the index of each pair (token, expert) in the order of experts; no tensor over tokens x experts x
capacity is made. If each token has k rows, the combination is a gather too, forward and backward, so sums have one
order on every device.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_hybrid.experts.moe.assign_expert_rows import Dispatch


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
