"""Sharding rules of operations on tensors that are sharded along the vocabulary.

A rule takes the arguments of one kernel and returns its result, or ``NotImplemented``: then the kernel runs on full
tensors, which is always right. Autograd runs above these rules; gradients of shards are shards.

Tensors that are no shards are equal on every rank. So a plain tensor of the full size is narrowed to this rank's rows,
unless it needs a gradient, which would then be a shard where a plain tensor is expected.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.logits.vocabulary import VocabularyShard

Rule = Callable[..., Any]
aten = torch.ops.aten


def rule_of(func: Any) -> Rule | None:
    """The rule of a kernel, or None if it runs on full tensors."""
    packet = func.overloadpacket
    if packet in _RULES:
        return _RULES[packet]
    if packet is aten.equal:  # a bool of all rows
        return None
    if torch.Tag.pointwise in func.tags or packet in _POINTWISE:
        return _in_place if func._schema.is_mutable else _pointwise
    return None


def _argument(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """An argument of a kernel by its name; its default if it is not given, None if there is no such argument."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[position] if position < len(args) else kwargs.get(name, argument.default_value)
    return None


def _made(func: Any, x: VocabularyShard, out: Any, dim: int) -> Any:
    """Shards of ``x`` from a kernel's results on its rows along ``dim``: views where the kernel makes some."""
    make = x.like if func._schema.returns[0].alias_info is None else x.view_of
    return [make(each, dim) for each in out] if isinstance(out, list | tuple) else make(out, dim)


# --- elementwise ------------------------------------------------------------------------------------------------------

_POINTWISE = {aten.copy_, aten.fill_, aten.zero_, aten.masked_fill_}


def _reference(args: Any, kwargs: Any) -> VocabularyShard | None:
    """The first shard, if all others have the same rows, and no operand would get a shard as its gradient."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    shards = [tensor for tensor in tensors if isinstance(tensor, VocabularyShard)]
    first = shards[0]
    if any(not first.has_same_rows(other) for other in shards):
        return None
    if any(tensor.requires_grad and _is_full_operand(tensor, first) for tensor in tensors):
        return None  # its gradient would be a shard
    return first


def _is_full_operand(value: Any, reference: VocabularyShard) -> bool:
    """Whether a plain operand has all rows of a vocabulary."""
    if isinstance(value, VocabularyShard) or not isinstance(value, Tensor) or value.dim() < -reference.from_right:
        return False
    return value.shape[reference.from_right] != 1


def _operand(value: Any, reference: VocabularyShard) -> Any:
    if isinstance(value, VocabularyShard):
        return value.local
    if _is_full_operand(value, reference):
        return reference.vocabulary.local_rows(value, reference.from_right % value.dim())
    return value


def _pointwise(func: Any, args: Any, kwargs: Any) -> Any:
    reference = _reference(args, kwargs)
    if reference is None or any(isinstance(value, list | tuple) for value in args):
        return NotImplemented
    local = [_operand(value, reference) for value in args]
    out = func(*local, **{key: _operand(value, reference) for key, value in kwargs.items()})
    return reference.like(out, out.dim() + reference.from_right)


def _in_place(func: Any, args: Any, kwargs: Any) -> Any:
    reference = _reference(args, kwargs)
    if reference is None or not isinstance(args[0], VocabularyShard) or "out" in kwargs:
        return NotImplemented
    func(*[_operand(value, reference) for value in args], **{k: _operand(v, reference) for k, v in kwargs.items()})
    args[0].mark_written()
    return args[0]


def _to_copy(func: Any, args: Any, kwargs: Any) -> Any:
    (x,) = args
    device = kwargs.get("device")
    return x.like(func(x.local, **kwargs)) if device is None or device == x.device else NotImplemented


def _new_filled(func: Any, args: Any, kwargs: Any) -> Any:
    """New memory for a tensor of the same vocabulary, such as a gradient."""
    x, size, *rest = args
    dim = len(size) + x.from_right
    if dim < 0 or size[dim] != x.vocabulary.length:
        return NotImplemented
    size = [*size[:dim], x.vocabulary.local_length, *size[dim + 1 :]]
    return x.like(func(x.local, size, *rest, **kwargs), dim)


# --- shapes -----------------------------------------------------------------------------------------------------------


def _view(func: Any, args: Any, kwargs: Any) -> Any:
    x, sizes = args
    sizes = list(sizes)
    if -1 in sizes:
        rest = prod(size for size in sizes if size != -1)
        if rest == 0:
            return NotImplemented
        sizes[sizes.index(-1)] = x.numel() // rest
    before = prod(x.shape[: x.cut_dim])
    for dim, size in enumerate(sizes):
        if size == x.vocabulary.length and prod(sizes[:dim]) == before:
            sizes[dim] = x.vocabulary.local_length
            return x.view_of(func(x.local, sizes), dim)
    return NotImplemented


def _expand(func: Any, args: Any, kwargs: Any) -> Any:
    x, sizes, *rest = args
    sizes = list(sizes)
    if sizes[x.from_right] in (-1, x.vocabulary.length):
        sizes[x.from_right] = x.vocabulary.local_length
        return x.view_of(func(x.local, sizes, *rest, **kwargs), len(sizes) + x.from_right)
    return NotImplemented


def _as_strided(func: Any, args: Any, kwargs: Any) -> Any:
    """The call by which autograd writes a dense view: the same elements in another shape."""
    x, sizes, strides, *rest = args
    if (rest and rest[0]) or not x.is_contiguous() or tuple(strides) != _dense_strides(sizes):
        return NotImplemented
    return _view(aten.view.default, (x, sizes), {}) if prod(sizes) == x.numel() else NotImplemented


def _new_strided(func: Any, args: Any, kwargs: Any) -> Any:
    x, sizes, strides = args
    if tuple(strides) != _dense_strides(sizes):
        return NotImplemented
    return _new_filled(aten.new_empty.default, (x, sizes), kwargs)


def _dense_strides(sizes: Any) -> tuple[int, ...]:
    return tuple(prod(sizes[dim + 1 :]) for dim in range(len(sizes)))


def _same(func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    if not isinstance(x, VocabularyShard):
        return NotImplemented
    return _made(func, x, func(x.local, *args[1:], **kwargs), x.cut_dim)


def _transposed(func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    if func.overloadpacket is aten.permute:
        order = [dim % x.dim() for dim in args[1]]
    else:
        order = list(range(x.dim()))
        first, second = args[1:] if len(args) > 1 else (0, -1)
        order[first], order[second] = order[second], order[first]
    return x.view_of(x.local.permute(order), order.index(x.cut_dim))


def _unsqueeze(func: Any, args: Any, kwargs: Any) -> Any:
    x, dim = args
    return x.view_of(func(x.local, dim), x.cut_dim + (dim % (x.dim() + 1) <= x.cut_dim))


def _squeeze(func: Any, args: Any, kwargs: Any) -> Any:
    x, dims = args[0], _argument(func, "dim", args, kwargs)
    dims = range(x.dim()) if dims is None else [dims] if isinstance(dims, int) else dims
    removed = [dim % x.dim() for dim in dims if x.shape[dim] == 1 and dim % x.dim() != x.cut_dim]
    return x.view_of(x.local.squeeze(tuple(removed)), x.cut_dim - sum(dim < x.cut_dim for dim in removed))


def _along(func: Any, args: Any, kwargs: Any) -> Any:
    """Operations along one dim, other than the sharded one, which may remove it."""
    x, dim = args[0], _argument(func, "dim", args, kwargs)
    if not isinstance(x, VocabularyShard) or dim % x.dim() == x.cut_dim:
        return NotImplemented
    out = func(x.local, *args[1:], **kwargs)
    removes = any(each.dim() < x.dim() for each in ([out] if isinstance(out, Tensor) else out))
    return _made(func, x, out, x.cut_dim - (removes and dim % x.dim() < x.cut_dim))


def _sliced(func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    dim, start, end, step = (_argument(func, name, args, kwargs) for name in ("dim", "start", "end", "step"))
    if dim % x.dim() != x.cut_dim:
        return _along(func, args, kwargs)
    if (start or 0) == 0 and (end is None or end >= x.vocabulary.length) and step == 1:
        return x.view_of(x.local.view_as(x.local))
    return NotImplemented


def _cat(func: Any, args: Any, kwargs: Any) -> Any:
    tensors, dim = args[0], _argument(func, "dim", args, kwargs)
    first = tensors[0]
    if not isinstance(first, VocabularyShard) or dim % first.dim() == first.cut_dim:
        return NotImplemented
    if any(not first.has_same_rows(other) for other in tensors):
        return NotImplemented
    return first.like(func([tensor.local for tensor in tensors], dim))


def _slice_backward(func: Any, args: Any, kwargs: Any) -> Any:
    grad, sizes, dim, *rest = args
    cut = grad.cut_dim + (func.overloadpacket is aten.select_backward and dim % len(sizes) <= grad.cut_dim)
    if dim % len(sizes) == cut:
        return NotImplemented
    sizes = [grad.vocabulary.local_length if k == cut else size for k, size in enumerate(sizes)]
    return grad.like(func(grad.local, sizes, dim, *rest), cut)


# --- positions chosen by indices --------------------------------------------------------------------------------------


def _dims_indexed(indices: Any, x: VocabularyShard) -> int | None:
    """The number of first dims that are indexed, if all are before the sharded one; None otherwise."""
    while indices and indices[-1] is None:
        indices = indices[:-1]
    if not indices or any(not isinstance(i, Tensor) or isinstance(i, VocabularyShard) for i in indices):
        return None
    count = sum(index.dim() if index.dtype in (torch.bool, torch.uint8) else 1 for index in indices)
    return count if count <= x.cut_dim else None


def _index(func: Any, args: Any, kwargs: Any) -> Any:
    x, indices = args
    if not isinstance(x, VocabularyShard) or _dims_indexed(indices, x) is None:
        return NotImplemented
    out = func(x.local, indices)
    return x.like(out, out.dim() + x.from_right)


def _index_put(func: Any, args: Any, kwargs: Any) -> Any:
    x, indices, values, *rest = args
    if not isinstance(x, VocabularyShard) or _dims_indexed(indices, x) is None:
        return NotImplemented
    if _reference((x, values), {}) is None:
        return NotImplemented
    out = func(x.local, indices, _operand(values, x), *rest, **kwargs)
    if not func._schema.is_mutable:
        return x.like(out)
    x.mark_written()
    return x


# --- sums and products ------------------------------------------------------------------------------------------------


def _sum(func: Any, args: Any, kwargs: Any) -> Any:
    x, over, keep = args[0], _argument(func, "dim", args, kwargs), bool(_argument(func, "keepdim", args, kwargs))
    dims = [dim % x.dim() for dim in ([over] if isinstance(over, int) else over)] if over else [*range(x.dim())]
    is_mean = func.overloadpacket is aten.mean
    if x.cut_dim not in dims:
        local = x.local.mean if is_mean else x.local.sum
        return x.like(local(dims, keep, **kwargs), x.cut_dim if keep else x.cut_dim - sum(d < x.cut_dim for d in dims))
    total = x.vocabulary.summed(x.local.sum(dims, keep, **kwargs))
    return total / prod(x.shape[dim] for dim in dims) if is_mean else total


def _mm(func: Any, args: Any, kwargs: Any) -> Any:
    """``a @ b``: a shard if an outer dim is sharded, a sum over ranks if the contracted dim is."""
    a, b = args
    if isinstance(a, VocabularyShard) and a.cut_dim == 0 and not isinstance(b, VocabularyShard):
        return a.like(func(a.local, b))
    if isinstance(b, VocabularyShard) and b.cut_dim == 1 and not isinstance(a, VocabularyShard):
        return b.like(func(a, b.local))
    left, right = _contracted(a, 1, b), _contracted(b, 0, a)
    if left is None or right is None:
        return NotImplemented
    vocabulary = a.vocabulary if isinstance(a, VocabularyShard) else b.vocabulary
    return vocabulary.summed(func(left, right))


def _contracted(x: Tensor, dim: int, other: Tensor) -> Tensor | None:
    """This rank's shard of a factor along the contracted ``dim``, if it is or can be sharded along it."""
    if isinstance(x, VocabularyShard):
        return x.local if x.cut_dim == dim else None
    assert isinstance(other, VocabularyShard)
    return None if x.requires_grad else other.vocabulary.local_rows(x, dim)


def _addmm(func: Any, args: Any, kwargs: Any) -> Any:
    bias, a, b = args
    if isinstance(a, VocabularyShard) or not isinstance(b, VocabularyShard) or b.cut_dim != 1:
        return NotImplemented
    if not isinstance(bias, VocabularyShard) and bias.requires_grad and bias.shape[-1] != 1:
        return NotImplemented
    if isinstance(bias, VocabularyShard) and bias.from_right != -1:
        return NotImplemented
    return b.like(func(_operand(bias, b), a, b.local, **kwargs))


# --- softmax ----------------------------------------------------------------------------------------------------------


def _log_sum(x: VocabularyShard, local: Tensor) -> Tensor:
    """The logarithm of the sum of exponentials over the full vocabulary; the sharded dim stays, with size 1."""
    of_rank = torch.logsumexp(local, x.cut_dim, keepdim=True)
    return torch.logsumexp(torch.stack(x.vocabulary.ranks.all_gather(of_rank.contiguous())), 0)


def _softmax(func: Any, args: Any, kwargs: Any) -> Any:
    x, dim, to_float = args
    if dim % x.dim() != x.cut_dim:
        return _along(func, args, kwargs)
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


def logits_at(x: VocabularyShard, rows: Tensor) -> Tensor:
    """The values at these rows along the last dim, which is sharded; the shape is the shape of ``rows``."""
    local, foreign = x.vocabulary.located(rows)
    return x.vocabulary.summed(x.local.gather(-1, local).masked_fill_(foreign, 0))


def vocabulary_last(x: VocabularyShard) -> tuple[VocabularyShard, int]:
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
    x, _ = vocabulary_last(x)
    ignored = target == ignore
    picked = logits_at(x, target.masked_fill(ignored, 0).unsqueeze(-1)).squeeze(-1)
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
    x, dim = vocabulary_last(x)
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


def _argmax(func: Any, args: Any, kwargs: Any) -> Any:
    """``argmax`` along the vocabulary: each rank sends its largest value and its row."""
    x, dim = args[0], _argument(func, "dim", args, kwargs)
    if dim is None or dim % x.dim() != x.cut_dim:
        return NotImplemented
    values, rows = x.local.max(x.cut_dim, keepdim=True)
    ranks = x.vocabulary.ranks
    owners = torch.stack(ranks.all_gather(values.contiguous())).argmax(0, keepdim=True)
    rows = torch.stack(ranks.all_gather(rows + x.vocabulary.offset)).gather(0, owners)[0]
    return rows if _argument(func, "keepdim", args, kwargs) else rows.squeeze(x.cut_dim)


_RULES: dict[Any, Rule] = {
    aten._to_copy: _to_copy,
    **dict.fromkeys((aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like), _same),
    **dict.fromkeys((aten.new_zeros, aten.new_empty, aten.new_ones, aten.new_full), _new_filled),
    **dict.fromkeys((aten.view, aten._unsafe_view), _view),
    aten.as_strided: _as_strided,
    aten.new_empty_strided: _new_strided,
    aten.expand: _expand,
    **dict.fromkeys((aten.alias, aten.detach, aten.lift_fresh), _same),
    **dict.fromkeys((aten.t, aten.transpose, aten.permute), _transposed),
    aten.unsqueeze: _unsqueeze,
    aten.squeeze: _squeeze,
    aten.slice: _sliced,
    **dict.fromkeys((aten.select, aten.split, aten.split_with_sizes, aten.unbind, aten.index_select), _along),
    aten.cat: _cat,
    **dict.fromkeys((aten.slice_backward, aten.select_backward), _slice_backward),
    aten.index: _index,
    **dict.fromkeys((aten.index_put, aten.index_put_, aten._index_put_impl_), _index_put),
    **dict.fromkeys((aten.sum, aten.mean), _sum),
    aten.mm: _mm,
    aten.addmm: _addmm,
    **dict.fromkeys((aten._log_softmax, aten._softmax), _softmax),
    **dict.fromkeys((aten._log_softmax_backward_data, aten._softmax_backward_data), _softmax_backward),
    aten.logsumexp: _logsumexp,
    **dict.fromkeys((aten.nll_loss_forward, aten.nll_loss2d_forward), _nll),
    **dict.fromkeys((aten.nll_loss_backward, aten.nll_loss2d_backward), _nll_backward),
    aten.argmax: _argmax,
}
