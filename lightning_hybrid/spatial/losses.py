"""Rules of losses of images, of random numbers, and of what else the vocabulary's rules do not know of rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.logits.vocabulary import VocabularyShard
from lightning_hybrid.spatial.windows import local_rows, named

aten = torch.ops.aten
_MEAN = 1


def nll(func: Any, args: Any, kwargs: Any) -> Any:
    """Negative log likelihood of pixels, (N, classes, rows, ...), with targets (N, rows, ...)."""
    x, target, weight, reduction, ignore = args
    if not isinstance(x, VocabularyShard) or x.cut_dim < 2:
        return NotImplemented
    local_target = local_rows(target, x.vocabulary, x.from_right)
    out, total = func(x.local, local_target.contiguous(), weight, 2 if reduction else 0, ignore)
    if not reduction:
        return x.like(out, x.cut_dim - 1), total
    out, total = x.vocabulary.summed(torch.stack([out, total])).unbind()
    return out / total if reduction == _MEAN else out, total.clone()


def nll_backward(func: Any, args: Any, kwargs: Any) -> Any:
    """The gradient of the log probabilities."""
    grad, x, target, weight, reduction, ignore, total = args
    if not isinstance(x, VocabularyShard) or x.cut_dim < 2:
        return NotImplemented
    local_target = local_rows(target, x.vocabulary, x.from_right).contiguous()
    if not reduction:
        grad = local_rows(grad, x.vocabulary, x.from_right).contiguous()
    return x.like(func(grad, x.local, local_target, weight, reduction, ignore, total))


def _operand(value: Any, x: VocabularyShard) -> Any:
    """An argument beside this rank's rows of x; one without rows, or with one for all, as it is."""
    has_rows = isinstance(value, Tensor) and value.dim() >= -x.from_right and value.shape[x.from_right] != 1
    return local_rows(value, x.vocabulary, x.from_right) if has_rows else value


def pixelwise(func: Any, args: Any, kwargs: Any) -> Any:
    """A loss of each pixel, or its sum or mean."""
    given = named(func, args, kwargs)
    reduction = given["reduction"]
    x = given["self"]
    tensors = [value for value in given.values() if isinstance(value, Tensor)]
    if not isinstance(x, VocabularyShard) or x.shape != torch.broadcast_shapes(*(value.shape for value in tensors)):
        return NotImplemented
    if any(value.requires_grad for value in tensors if not isinstance(value, VocabularyShard)):
        return NotImplemented  # its gradient would be a shard
    given["reduction"] = 2 if reduction else 0
    local = {name: _operand(value, x) for name, value in given.items()}
    out = func(**local)
    if not reduction:
        return x.like(out)
    total = x.vocabulary.summed(out)
    return total / x.numel() if reduction == _MEAN else total


def pixelwise_backward(func: Any, args: Any, kwargs: Any) -> Any:
    """The gradient of the prediction."""
    given = named(func, args, kwargs)
    reduction, x = given["reduction"], given["self"]
    if not isinstance(x, VocabularyShard):
        return NotImplemented
    local = {name: _operand(value, x) for name, value in given.items()}
    if reduction == _MEAN:
        local["grad_output"], local["reduction"] = local["grad_output"] / x.numel(), 2
    return x.like(func(**local))


def draw(func: Any, args: Any, kwargs: Any) -> Any:
    """Fill with random numbers: each rank draws them for all rows, as one process would, and keeps its own."""
    x = args[0]
    if not isinstance(x, VocabularyShard) or any(isinstance(value, VocabularyShard) for value in args[1:]):
        return NotImplemented
    full = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    func(full, *args[1:], **kwargs)
    x.local.copy_(x.vocabulary.local_rows(full, x.cut_dim))
    x.mark_written()
    return x


def draw_like(func: Any, args: Any, kwargs: Any) -> Any:
    """Random numbers in the shape of a sharded tensor."""
    x = args[0]
    full = func(torch.empty(x.shape, dtype=x.dtype, device=x.device), *args[1:], **kwargs)
    return x.like(x.vocabulary.local_rows(full, x.cut_dim).clone())


_LOSSES = (aten.mse_loss, aten.smooth_l1_loss, aten.huber_loss, aten.binary_cross_entropy)

RULES = {
    **dict.fromkeys((aten.nll_loss_forward, aten.nll_loss2d_forward), nll),
    **dict.fromkeys((aten.nll_loss_backward, aten.nll_loss2d_backward), nll_backward),
    **dict.fromkeys((*_LOSSES, aten.binary_cross_entropy_with_logits), pixelwise),
    **{getattr(aten, f"{loss.__name__}_backward"): pixelwise_backward for loss in _LOSSES},
    **dict.fromkeys((aten.bernoulli_, aten.normal_, aten.uniform_), draw),
    **dict.fromkeys((aten.rand_like, aten.randn_like), draw_like),
}
