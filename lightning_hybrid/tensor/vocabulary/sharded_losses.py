"""Vocabulary-parallel softmax and cross entropy, where each rank holds its rows of the vocabulary.

The log of the sum over all rows exchanges one number per position and rank, the target's logit one sum per position.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_hybrid.step.tracing.functions import NotIntercepted
from lightning_hybrid.tensor.vocabulary.vocabulary_ranges_and_local_shard import VocabularyShard
from lightning_hybrid.tensor.vocabulary.vocabulary_sharded_op_rules import Rule

aten = torch.ops.aten


# --- softmax ----------------------------------------------------------------------------------------------------------


def _log_sum(x: VocabularyShard, local: Tensor) -> Tensor:
    """The logarithm of the sum of exponentials over the full vocabulary; the sharded dim stays, with size 1."""
    of_rank = torch.logsumexp(local, x.cut_dim, keepdim=True)
    return torch.logsumexp(torch.stack(x.vocabulary.ranks.all_gather(of_rank.contiguous())), 0)


def _softmax(func: Any, args: Any, kwargs: Any) -> Any:
    x, dim, to_float = args
    if dim % x.dim() != x.cut_dim:
        return x.like(func(x.local, dim, to_float))
    out_dtype = torch.float32 if to_float else x.dtype
    local = x.local.to(torch.promote_types(x.dtype, torch.float32))  # as torch's own kernels do
    out = local - _log_sum(x, local)
    if func.overloadpacket is aten._softmax:
        out = out.exp_()
    return x.like(out.to(out_dtype))


def _softmax_backward(func: Any, args: Any, kwargs: Any) -> Any:
    grad, out, dim, dtype = args
    if not isinstance(out, VocabularyShard) or (isinstance(grad, VocabularyShard) and not out.has_same_rows(grad)):
        return NotImplemented
    local_grad = grad.local if isinstance(grad, VocabularyShard) else out.vocabulary.local_rows(grad, out.cut_dim)
    if dim % out.dim() != out.cut_dim:
        return out.like(func(local_grad, out.local, dim, dtype))
    wide = torch.promote_types(local_grad.dtype, torch.float32)
    local_grad, local = local_grad.to(wide), out.local.to(wide)
    is_log = func.overloadpacket is aten._log_softmax_backward_data
    addend = local_grad if is_log else local_grad * local
    total = grad.sums if is_log and isinstance(grad, VocabularyShard) else None
    if total is None:
        total = out.vocabulary.summed(addend.sum(out.cut_dim, keepdim=True))
    result = addend - (local.exp() if is_log else local) * total
    return out.like(result.to(dtype))


def _logsumexp(func: Any, args: Any, kwargs: Any) -> Any:
    x, dims, *keep = args
    if [dim % x.dim() for dim in dims] != [x.cut_dim]:
        return NotImplemented
    out = _log_sum(x, x.local)
    return out if keep and keep[0] else out.squeeze(x.cut_dim)


# --- the target's logit -----------------------------------------------------------------------------------------------


def _logits_at(x: VocabularyShard, rows: Tensor) -> Tensor:
    """The values at these rows along the last dim, which is the sharded one; the shape is that of ``rows``."""
    local, foreign = x.vocabulary.located(rows)
    return x.vocabulary.summed(x.local.gather(-1, local).masked_fill_(foreign, 0))


def _vocabulary_last(x: VocabularyShard) -> tuple[VocabularyShard, int]:
    """Moves the vocabulary to the last dim; returns the dim that it was in, too."""
    return x.view_of(x.local.movedim(x.cut_dim, -1), x.dim() - 1), x.cut_dim


def _weights(target: Tensor, weight: Tensor | None, ignored: Tensor, like: Tensor) -> Tensor:
    weights = like.new_ones(target.shape) if weight is None else weight[target.masked_fill(ignored, 0)]
    return weights.masked_fill(ignored, 0)


def _nll(func: Any, args: Any, kwargs: Any) -> Any:
    """Negative log likelihood: the same sums as torch's, of logits that their owner ranks send."""
    x, target, weight, reduction, ignore = args
    if not isinstance(x, VocabularyShard) or isinstance(target, VocabularyShard) or isinstance(weight, VocabularyShard):
        return NotImplemented
    x, _ = _vocabulary_last(x)
    ignored = target == ignore
    picked = _logits_at(x, target.masked_fill(ignored, 0).unsqueeze(-1)).squeeze(-1)
    weights = _weights(target, weight, ignored, picked)
    losses = torch.where(ignored, torch.zeros_like(picked), -picked * weights)
    if reduction == 0:
        return losses, picked.new_zeros(())
    total = weights.sum()
    return (losses.sum() / total if reduction == 1 else losses.sum()), total


def _nll_backward(func: Any, args: Any, kwargs: Any) -> Any:
    grad, x, target, weight, reduction, ignore, total = args
    if not isinstance(x, VocabularyShard) or any(
        isinstance(other, VocabularyShard) for other in (grad, target, weight)
    ):
        return NotImplemented
    x, dim = _vocabulary_last(x)
    ignored = target == ignore
    weights = _weights(target, weight, ignored, grad)
    each = torch.where(ignored, torch.zeros_like(weights), -weights * (grad / total if reduction == 1 else grad))
    local, foreign = x.vocabulary.located(target.masked_fill(ignored, 0).unsqueeze(-1))
    each = each.unsqueeze(-1)
    out = torch.zeros_like(x.local).scatter_(-1, local, each.masked_fill(foreign, 0))
    result = x.like(out.movedim(-1, dim), dim)
    result.sums = each.movedim(-1, dim)
    return result


# --- maximum ----------------------------------------------------------------------------------------------------------


def _max(func: Any, args: Any, kwargs: Any) -> Any:
    """``max`` and ``argmax`` along the vocabulary: each rank sends its largest value and its row."""
    x, *rest = args
    dim = rest[0] if rest else kwargs.get("dim")
    if dim is None or dim % x.dim() != x.cut_dim:
        return NotImplemented
    keep = rest[1] if len(rest) > 1 else kwargs.get("keepdim", False)
    values, rows = x.local.max(x.cut_dim, keepdim=True)
    vocabulary = x.vocabulary
    all_values = torch.stack(vocabulary.ranks.all_gather(values.contiguous()))
    all_rows = torch.stack(vocabulary.ranks.all_gather(rows + vocabulary.offset))
    values, owners = all_values.max(0, keepdim=True)
    rows = all_rows.gather(0, owners)[0]
    values = values[0]
    if not keep:
        values, rows = values.squeeze(x.cut_dim), rows.squeeze(x.cut_dim)
    return rows if func.overloadpacket is aten.argmax else (values, rows)


LOSS_RULES: dict[Any, Rule] = {
    **dict.fromkeys((aten._log_softmax, aten._softmax), _softmax),
    **dict.fromkeys((aten._log_softmax_backward_data, aten._softmax_backward_data), _softmax_backward),
    aten.logsumexp: _logsumexp,
    **dict.fromkeys((aten.nll_loss_forward, aten.nll_loss2d_forward), _nll),
    **dict.fromkeys((aten.nll_loss_backward, aten.nll_loss2d_backward), _nll_backward),
    aten.argmax: _max,
}


# --- gather, whose own backward would gather the full tensor ----------------------------------------------------------


class _Gather(torch.autograd.Function, NotIntercepted):
    @staticmethod
    def forward(ctx: Any, x: VocabularyShard, rows: Tensor) -> Tensor:
        """The values at ``rows``, in their shape."""
        ctx.save_for_backward(rows)
        ctx.like = x.vocabulary, type(x), x.local.shape, x.cut_dim
        last, dim = _vocabulary_last(x)
        return _logits_at(last, rows.movedim(dim, -1)).movedim(-1, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[VocabularyShard, None]:
        """The gradient of this rank's rows."""
        (rows,) = ctx.saved_tensors
        vocabulary, kind, shape, dim = ctx.like
        local, foreign = vocabulary.located(rows)
        out = grad.new_zeros(shape).scatter_add_(dim, local, grad.masked_fill(foreign, 0))
        return kind(out, dim, vocabulary), None


def gather_rows(x: Any, dim: Any, index: Any, *, sparse_grad: bool = False) -> Any:
    """``torch.gather`` along the sharded dim; ``NotImplemented`` along another dim."""
    if not isinstance(x, VocabularyShard) or not isinstance(dim, int) or dim % x.dim() != x.cut_dim or sparse_grad:
        return NotImplemented
    same = all(index.shape[k] == x.shape[k] for k in range(x.dim()) if k != x.cut_dim)
    return _Gather.apply(x, index) if same and prod(index.shape) else NotImplemented
