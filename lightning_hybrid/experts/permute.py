"""Rows of tokens in the order of their experts, and back, each with a backward that gathers instead of adding up."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def spread(hidden: Tensor, order: Tensor, k: int) -> Tensor:
    """The row of each pair of a token and one of its k experts.

    Args:
        hidden: [T, D].
        order: [P] with P <= T * k: numbers of pairs (token * k + place), each once, in the order wanted; all T * k of
            them, of which the caller may mean the first ones only.
        k: Experts of each token.

    Returns:
        [P, D].
    """
    rows: Tensor = _Spread.apply(hidden, order, k)
    return rows


def gathered(rows: Tensor, order: Tensor) -> Tensor:
    """Rows by pair again: the inverse of the permutation; zeros for pairs behind the last row.

    Args:
        rows: [P, D], the first P of ``order``.
        order: [T * k], as in ``spread``.

    Returns:
        [T * k, D].
    """
    pairs: Tensor = _Gathered.apply(rows, order)
    return pairs


def _inverse(order: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return inverse


def _padded(rows: Tensor, length: int) -> Tensor:
    missing = length - rows.shape[0]
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, order: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.k = k
        return hidden.index_select(0, order // k)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (order,) = ctx.saved_tensors
        by_pair = gradients[0].index_select(0, _inverse(order))
        return by_pair.view(-1, ctx.k, by_pair.shape[-1]).sum(1), None, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        ctx.num_rows = rows.shape[0]
        return _padded(rows, order.numel()).index_select(0, _inverse(order))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (order,) = ctx.saved_tensors
        return gradients[0].index_select(0, order[: ctx.num_rows]), None
