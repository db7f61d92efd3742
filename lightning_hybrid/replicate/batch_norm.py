"""Synchronized BatchNorm: each microbatch is normalized by the statistics of all replicas' microbatches.

The layers run unchanged (subclasses, activations, updates of averages); only the operation that all of them call,
``torch.batch_norm``, is replaced while a training step and its backward run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from lightning_hybrid.patching import replaced
from lightning_hybrid.step.tracing.functions import NotIntercepted

# Bound at import: while a step runs, the functions of torch.distributed are replaced to intercept user calls.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_all_reduce = dist.all_reduce


class SyncedBatchNorm:
    """Synchronizes BatchNorm over the replicas for ``Trainer(sync_batchnorm=True)``.

    All replicas must call the same layers equally often: each call in training waits for the others', forward and
    backward. That holds where they run the same step and split their batches into as many microbatches.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Take ``group`` (ranks that hold the same shard of the module on each replica)."""
        self._group = group
        self._original = torch.batch_norm

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Uses the statistics of all replicas in training steps and backwards inside the context."""
        if torch.batch_norm == self._batch_norm:  # a backward inside of a manual step
            yield
            return
        self._original = torch.batch_norm
        with replaced(torch, "batch_norm", self._batch_norm, reason="statistics over all replicas"):
            yield

    def _batch_norm(
        self,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        training: bool,
        momentum: float,
        eps: float,
        cudnn_enabled: bool,
    ) -> Tensor:
        if not training or isinstance(input, FakeTensor):  # no communication while a step is recorded
            return self._original(
                input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled
            )
        mean, variance, count = _statistics(input.detach(), self._group)
        with torch.no_grad():
            if running_mean is not None:
                running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            if running_var is not None:
                unbiased = variance * (count / (count - 1).clamp_min(1))
                running_var.lerp_(unbiased.to(running_var.dtype), momentum)
        return _Normalize.apply(input, weight, bias, mean, (variance + eps).rsqrt(), count, self._group)


def _statistics(x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """All-replica mean and biased variance by channel ([C] each), and the count of each (Chan et al. 1983)."""
    channels = x.shape[1]
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    if x.numel():
        variance, mean = torch.var_mean(wide, _reduced_dims(x), correction=0)
    else:
        variance = mean = wide.new_zeros(channels)
    local = torch.cat([mean, variance, wide.new_full((1,), x.numel() // channels)])
    gathered = local.new_empty(group.size() * len(local))
    _all_gather(gathered, local, group=group)
    means, variances, counts = gathered.view(group.size(), -1).split([channels, channels, 1], dim=1)
    count = counts.sum()
    weights = counts / count
    mean = (means * weights).sum(0)
    variance = ((variances + (means - mean).square()) * weights).sum(0)
    return mean, variance, count


class _Normalize(NotIntercepted, torch.autograd.Function):
    """Computes ``(x - mean) / deviation * weight + bias``; mean and deviation are functions of all replicas' x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        inverse: Tensor,
        count: Tensor,
        group: dist.ProcessGroup,
    ) -> Tensor:
        """Normalizes x of shape (samples, channels, ...); weight, bias, mean and inverse have shape (channels,)."""
        ctx.save_for_backward(x, weight, mean, inverse, count)
        ctx.group = group
        shape = _channel_shape(x)
        scale = inverse if weight is None else inverse * weight
        shift = -mean * scale if bias is None else bias - mean * scale
        return torch.addcmul(shift.view(shape), x.to(scale.dtype), scale.view(shape)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of x, which has the shape of ``grad``, and of weight and bias."""
        x, weight, mean, inverse, count = ctx.saved_tensors
        shape, dims = _channel_shape(x), _reduced_dims(x)
        wide = grad.to(mean.dtype)
        centered = x.to(mean.dtype) - mean.view(shape)
        sums = torch.stack([wide.sum(dims), (wide * centered).sum(dims)])
        grad_weight = (sums[1] * inverse).to(weight.dtype) if ctx.needs_input_grad[1] else None
        grad_bias = sums[0].to(grad.dtype if weight is None else weight.dtype) if ctx.needs_input_grad[2] else None
        # Also if this rank needs no gradient: others may.
        totals = sums.clone()
        _all_reduce(totals, group=ctx.group)
        if not ctx.needs_input_grad[0]:
            return None, grad_weight, grad_bias, None, None, None, None
        scale = inverse if weight is None else inverse * weight
        of_mean, of_deviation = totals / count
        grad_x = wide - of_mean.view(shape)
        grad_x -= centered.mul_((of_deviation * inverse.square()).view(shape))
        grad_x *= scale.view(shape)
        return grad_x.to(x.dtype), grad_weight, grad_bias, None, None, None, None


def _reduced_dims(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _channel_shape(x: Tensor) -> list[int]:
    return [1, -1, *(1 for _ in range(x.dim() - 2))]
