"""Rules of normalization: statistics over the rows of all ranks.

BatchNorm, and GroupNorm for each sample, average over rows: the ranks exchange their means and variances, which are
combined (Chan et al. 1983), and two sums in the backward. LayerNorm over channels needs rows of its own rank alone.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.logits.vocabulary import VocabularyShard
from lightning_hybrid.spatial.rows import Rows
from lightning_hybrid.spatial.windows import is_spatial, local_rows, summed

aten = torch.ops.aten


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _moments(x: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each channel, dim 1, over all else and the rows of all ranks."""
    found = aten.batch_norm_update_stats(_wide(x), None, None, 0.0)  # three times as fast as torch.var_mean
    found = torch.stack(rows.ranks.all_gather(torch.stack(found)))
    means, variances = found.unbind(1)
    share = means.new_tensor([count / rows.length for count in rows.counts])[:, None]
    mean = (means * share).sum(0)
    return mean, ((variances + (means - mean).square()) * share).sum(0)


def batch_norm(func: Any, args: Any, kwargs: Any) -> Any:
    """Normalizes by the statistics of a batch, or by averages."""
    x, weight, bias, running_mean, running_var, training, momentum, eps = args
    if not is_spatial(x):
        return NotImplemented
    if not training:
        out, *saved = func(x.local, weight, bias, running_mean, running_var, False, momentum, eps)
        return x.like(out), *saved
    mean, variance = _moments(x.local, x.vocabulary)
    count = x.numel() // x.shape[1]
    if running_mean is not None:
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        running_var.lerp_((variance * (count / max(1, count - 1))).to(running_var.dtype), momentum)
    out = func(x.local, weight, bias, mean, variance, False, 0.0, eps)[0]
    return x.like(out), mean, (variance + eps).rsqrt()


def batch_norm_backward(func: Any, args: Any, kwargs: Any) -> Any:
    """The gradients of input, weight and bias."""
    grad, x, weight, running_mean, running_var, mean, inverse, training, eps, mask = args
    if not is_spatial(x):
        return NotImplemented
    local = local_rows(grad, x.vocabulary, x.from_right).contiguous()
    if not training:
        found = func(local, x.local, weight, running_mean, running_var, mean, inverse, False, eps, mask)
        return None if found[0] is None else x.like(found[0]), *summed(x.vocabulary, found[1:])
    variance = inverse.square().reciprocal() - eps
    # As if statistics were constants: the gradients of weight and bias are then the sums that the input's needs.
    fixed, of_weight, of_bias = func(local, x.local, weight, mean, variance, mean, inverse, False, eps, [True] * 3)
    of_weight, of_bias = summed(x.vocabulary, [of_weight, of_bias])
    if mask[0]:
        count = x.numel() // x.shape[1]
        scale = inverse if weight is None else inverse * weight
        slope, level = -scale * inverse * of_weight / count, -scale * of_bias / count
        fixed = _shifted(fixed, x.local, slope, level - slope * mean)
    return x.like(fixed) if mask[0] else None, of_weight if mask[1] else None, of_bias if mask[2] else None


def _shifted(total: Tensor, x: Tensor, slope: Tensor, level: Tensor) -> Tensor:
    """Adds ``slope * x + level`` by channel to a tensor of the shape of x, in place."""
    shape = [1, -1, *(1 for _ in range(x.dim() - 2))]
    return total.addcmul_(x, slope.view(shape).to(x.dtype)).add_(level.view(shape).to(x.dtype))


def group_norm(func: Any, args: Any, kwargs: Any) -> Any:
    """Normalizes groups of channels of each sample."""
    x, weight, bias, samples, channels, _, groups, eps = args
    if not is_spatial(x):
        return NotImplemented
    moments = _moments(x.local.reshape(1, samples * groups, channels // groups, -1), x.vocabulary)
    mean, variance = (each.view(samples, groups) for each in moments)
    inverse = (variance + eps).rsqrt()
    scale, shift = inverse.repeat_interleave(channels // groups, 1), None
    scale = scale if weight is None else scale * weight
    shift = -mean.repeat_interleave(channels // groups, 1) * scale
    shift = shift if bias is None else shift + bias
    shape = [samples, channels, *(1 for _ in range(x.dim() - 2))]
    out = torch.addcmul(shift.view(shape), _wide(x.local), scale.view(shape)).to(x.dtype)
    return x.like(out), mean.to(x.dtype), inverse.to(x.dtype)


def group_norm_backward(func: Any, args: Any, kwargs: Any) -> Any:
    """The gradients of input, weight and bias."""
    grad, x, mean, inverse, weight, samples, channels, _, groups, mask = args
    if not is_spatial(x):
        return NotImplemented
    local, width = _wide(local_rows(grad, x.vocabulary, x.from_right)), channels // groups
    dims, wide = list(range(2, x.dim())), _wide(x.local)
    sums = torch.stack([local.sum(dims), (local * wide).sum(dims)])  # of each sample and channel
    sums = x.vocabulary.summed(sums)
    mean, inverse = _wide(mean).view(samples, groups), _wide(inverse).view(samples, groups)
    of_ones, of_x = sums.view(2, samples, groups, width)
    centered = (of_x - of_ones * mean[..., None]) * inverse[..., None]  # sums of the gradient times normalized x
    of_weight = centered.view(samples, channels).sum(0) if mask[1] else None
    of_bias = of_ones.view(samples, channels).sum(0) if mask[2] else None
    grad_x = None
    if mask[0]:
        gain = inverse[..., None].expand(-1, -1, width)
        gain = gain if weight is None else gain * weight.view(groups, width)
        factor = 1 if weight is None else weight.view(groups, width)
        count = x.numel() // (samples * groups)
        slope = -inverse * inverse * (centered * factor).sum(2) / count
        level = -inverse * (of_ones * factor).sum(2) / count - slope * mean
        shape = [samples, channels, *(1 for _ in dims)]
        each = [value[..., None].expand(-1, -1, width).reshape(shape) for value in (slope, level)]
        grad_x = torch.addcmul(each[1], wide, each[0]).addcmul_(local, gain.reshape(shape))
        grad_x = x.like(grad_x.to(x.dtype))
    like = x.dtype if weight is None else weight.dtype
    return grad_x, *(None if each is None else each.to(like) for each in (of_weight, of_bias))


def layer_norm(func: Any, args: Any, kwargs: Any) -> Any:
    """Normalizes the last dims, if the rows are not among them."""
    x, shape, *rest = args
    if not isinstance(x, VocabularyShard) or -x.from_right <= len(shape):
        return NotImplemented
    out, mean, inverse = func(x.local, shape, *rest)
    return x.like(out), x.like(mean), x.like(inverse)


def layer_norm_backward(func: Any, args: Any, kwargs: Any) -> Any:
    """The gradients of input, weight and bias."""
    grad, x, shape, mean, inverse, weight, bias, mask = args
    if not isinstance(x, VocabularyShard) or not isinstance(mean, VocabularyShard):
        return NotImplemented
    local = local_rows(grad, x.vocabulary, x.from_right)
    found = func(local, x.local, shape, mean.local, inverse.local, weight, bias, mask)
    return None if found[0] is None else x.like(found[0]), *summed(x.vocabulary, found[1:])


def var_mean(func: Any, args: Any, kwargs: Any) -> Any:
    """Variance and mean over dims that include the rows."""
    x, dims = args[0], args[1] if len(args) > 1 else None
    dims = [dim % x.dim() for dim in dims] if dims else list(range(x.dim()))
    if x.cut_dim not in dims or not x.is_floating_point():
        return NotImplemented
    kept = [dim for dim in range(x.dim()) if dim not in dims]
    count = math.prod(x.shape[dim] for dim in dims)
    sizes = [x.shape[dim] for dim in kept]
    mean, variance = _moments(x.local.permute(*kept, *dims).reshape(1, math.prod(sizes), 1, -1), x.vocabulary)
    correction = kwargs.get("correction")
    free = count - (1 if correction is None else correction)
    variance = variance * (count / free if free > 0 else float("nan"))
    if kwargs.get("keepdim"):
        sizes = [1 if dim in dims else size for dim, size in enumerate(x.shape)]
    return tuple(each.to(x.dtype).view(sizes) for each in (variance, mean))


RULES = {
    aten.native_batch_norm: batch_norm,
    aten.native_batch_norm_backward: batch_norm_backward,
    aten.native_group_norm: group_norm,
    aten.native_group_norm_backward: group_norm_backward,
    aten.native_layer_norm: layer_norm,
    aten.native_layer_norm_backward: layer_norm_backward,
    aten.var_mean: var_mean,
}
