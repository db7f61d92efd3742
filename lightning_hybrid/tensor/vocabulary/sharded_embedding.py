"""Vocabulary-parallel embedding lookup: each rank looks up the rows that it holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_hybrid.step.instrument.intercept_or_refuse_autograd_functions import NotIntercepted
from lightning_hybrid.tensor.vocabulary.vocabulary_ranges_and_local_shard import VocabularyShard


class _Lookup(torch.autograd.Function, NotIntercepted):
    @staticmethod
    def forward(ctx: Any, weight: VocabularyShard, rows: Tensor, padding: int | None) -> Tensor:
        """The rows of each rank, summed over ranks: the shape of ``rows``, and the features last."""
        vocabulary = weight.vocabulary
        local, foreign = vocabulary.located(rows)
        ctx.save_for_backward(local, foreign)
        ctx.weight_like, ctx.padding = (vocabulary, type(weight)), padding
        found = torch.embedding(weight.local, local).masked_fill_(foreign.unsqueeze(-1), 0)
        return vocabulary.summed(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[VocabularyShard, None, None]:
        """The gradient of this rank's rows."""
        local, foreign = ctx.saved_tensors
        vocabulary, kind = ctx.weight_like
        padding = -1
        if ctx.padding is not None:
            padding = ctx.padding % vocabulary.length - vocabulary.offset
            padding = padding if 0 <= padding < vocabulary.local_length else -1
        grad = grad.masked_fill(foreign.unsqueeze(-1), 0)
        dense = torch.ops.aten.embedding_dense_backward(grad, local, vocabulary.local_length, padding, False)
        return kind(dense, 0, vocabulary), None, None


def embedding_rows(
    rows: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """``F.embedding`` on a weight sharded by rows; ``NotImplemented`` where an option needs the rows of all ranks."""
    if not isinstance(weight, VocabularyShard) or weight.cut_dim != 0 or isinstance(rows, VocabularyShard):
        return NotImplemented
    if max_norm is not None or scale_grad_by_freq or sparse:
        return NotImplemented
    return _Lookup.apply(weight, rows, padding_idx)
