"""A loss of logits, computed in chunks of their rows: no more than one chunk of logits exists at a time.

    rows of hidden states:   chunk 0           chunk 1          ...
    forward                  logits ─► loss    logits ─► loss   ...      total = sum of the chunks' losses
                               └► gradient       └► gradient    ...      of rows, weight and bias, added up

The gradients are computed in the forward, where the logits are, and multiplied by the incoming gradient in the backward
(Liger Kernel's fused linear cross entropy, Hsu et al. 2024, section 3.2). Where that gradient is not one number (losses
of single rows), or the gradient of the weight is larger than the logits, the backward computes each chunk again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lightning_hybrid.step.tracing.functions import NotIntercepted

RowOp = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Autocast:
    """The state of autocast for one type of device."""

    device_type: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, device: torch.device) -> Autocast:
        """Return the state of the code that runs."""
        kind = device.type
        return cls(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))

    def entered(self) -> torch.autocast:
        """Return a context with this state."""
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=self.enabled)

    def dtype_of_product(self, x: Tensor) -> torch.dtype:
        """Return the dtype of a linear's result for the input ``x``, of any shape."""
        return self.dtype if self.enabled and x.is_floating_point() and x.dtype is not torch.float64 else x.dtype


@dataclass(frozen=True)
class RowLoss:
    """A loss of rows of logits and their targets.

    Attributes:
        function: ``cross_entropy`` or ``nll_loss``.
        class_weight: Of shape (vocabulary,), or None.
        ignore_index: The target of rows without a loss.
        reduction: "mean", "sum" or "none".
        options: Further keyword arguments of the function.
        row_ops: Applied to the logits first, such as a cast; each works on every row by itself.
        autocast: As at the call.
    """

    function: Callable[..., Tensor]
    class_weight: Tensor | None
    ignore_index: int
    reduction: str
    options: tuple[tuple[str, Any], ...]
    row_ops: tuple[RowOp, ...]
    autocast: Autocast

    def of(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the sum, or the loss of each row without a reduction, for logits of shape (rows, vocabulary)."""
        for op in self.row_ops:
            logits = op(logits)
        reduction = "none" if self.reduction == "none" else "sum"
        return self.function(
            logits,
            target,
            weight=self.class_weight,
            ignore_index=self.ignore_index,
            reduction=reduction,
            **dict(self.options),
        )

    def divisor(self, target: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return what a mean divides the sum by: the weights of all rows that are not ignored; None for no mean.

        Args:
            target: Of shape (rows,).
            dtype: Of the result, a scalar.
        """
        if self.reduction != "mean":
            return None
        counted = target != self.ignore_index
        if self.class_weight is None:
            return counted.sum().to(dtype)
        weights = self.class_weight.detach()[target.masked_fill(~counted, 0)]
        return weights.masked_fill(~counted, 0).sum().to(dtype)


def loss_in_chunks(
    rows: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, loss: RowLoss, num_chunks: int
) -> Tensor:
    """Return the loss of ``rows @ weight.T + bias``, a scalar or one number per row, differentiable.

    Args:
        rows: Hidden states, of shape (rows, features).
        weight: Of shape (vocabulary, features).
        bias: Of shape (vocabulary,), or None.
        target: Of shape (rows,).
        loss: The loss.
        num_chunks: Number of chunks of the rows.
    """
    dtype = loss.autocast.dtype_of_product(rows)
    # Casts as a linear under autocast makes them, but once for all chunks.
    rows, weight, bias = rows.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    result: Tensor = _LossInChunks.apply(rows, weight, bias, target, loss, num_chunks)
    return result


def map_chunks(
    rows: Tensor, weight: Tensor, bias: Tensor | None, function: RowOp, autocast: Autocast, num_chunks: int
) -> Tensor:
    """Return ``function(logits)`` of each chunk, one value per row, joined to shape (rows,); without gradients.

    Arguments are those of `loss_in_chunks`.
    """
    dtype = autocast.dtype_of_product(rows)
    with torch.no_grad():
        rows, weight, bias = rows.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        return torch.cat([function(F.linear(chunk, weight, bias)) for chunk in rows.tensor_split(num_chunks)])


class _Sums:
    """The gradients of rows, weight and bias, added up over chunks; None for those that are not needed."""

    def __init__(self, rows: Tensor, weight: Tensor, bias: Tensor | None, needed: Sequence[bool]) -> None:
        self.rows = torch.empty_like(rows) if needed[0] else None
        self.weight = torch.empty_like(weight, dtype=_wide(weight.dtype)) if needed[1] else None
        self.bias = torch.zeros_like(bias, dtype=_wide(bias.dtype)) if bias is not None and needed[2] else None
        self._is_first = True

    def add(self, span: slice, rows: Tensor, weight: Tensor, grad: Tensor) -> None:
        """Add what the gradient of one chunk of logits, of shape (rows, vocabulary), gives."""
        if self.rows is not None:
            torch.mm(grad, weight, out=self.rows[span])
        if self.weight is not None:
            if self.weight.dtype is grad.dtype:
                self.weight.addmm_(grad.t(), rows[span], beta=0 if self._is_first else 1)
            elif self._is_first:
                self.weight.copy_(grad.t() @ rows[span])
            else:
                self.weight += grad.t() @ rows[span]
        if self.bias is not None:
            self.bias += grad.sum(0, dtype=self.bias.dtype)
        self._is_first = False

    def scaled(self, scale: Tensor, like: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Multiply by a scalar, in place; returns gradients of the dtypes of ``like``."""
        sums = (self.rows, self.weight, self.bias)
        return tuple(
            None if total is None or other is None else total.mul_(scale).to(other.dtype)
            for total, other in zip(sums, like, strict=True)
        )


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which many addends of a dtype are summed."""
    return torch.promote_types(dtype, torch.float32)


def _spans(num_rows: int, num_chunks: int) -> Iterator[slice]:
    each, more = divmod(num_rows, num_chunks)
    start = 0
    for chunk in range(num_chunks):
        stop = start + each + (chunk < more)
        yield slice(start, stop)
        start = stop


def _run_chunks(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    loss: RowLoss,
    num_chunks: int,
    sums: _Sums | None,
    grads: Tensor | None = None,
) -> list[Tensor]:
    """Compute the losses of the chunks, and add their gradients to ``sums``; ``grads`` are those of rows' losses."""
    losses = []
    for span in _spans(len(rows), num_chunks):
        logits = F.linear(rows[span], weight, bias)
        if sums is None:
            losses.append(loss.of(logits, target[span]))
            continue
        with torch.enable_grad():
            logits.requires_grad_()
            found = loss.of(logits, target[span])
        (grad,) = torch.autograd.grad(found, logits, None if grads is None else grads[span])
        losses.append(found.detach())
        del logits, found  # before the next chunk is allocated
        sums.add(span, rows, weight, grad)
    return losses


class _LossInChunks(torch.autograd.Function, NotIntercepted):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, loss: RowLoss, num_chunks: int
    ) -> Tensor:
        """The loss, a scalar or one number per row."""
        needed = ctx.needs_input_grad[:3]
        is_smaller = len(rows) >= weight.shape[1]  # the gradient of the weight, than the logits
        ctx.sums = None  # a second backward computes them again
        if any(needed) and loss.reduction != "none" and is_smaller:
            ctx.sums = _Sums(rows, weight, bias, needed)
        losses = _run_chunks(rows, weight, bias, target, loss, num_chunks, ctx.sums)
        ctx.save_for_backward(rows, weight, bias, target)
        ctx.loss, ctx.num_chunks, ctx.scale = loss, num_chunks, None
        if loss.reduction == "none":
            return torch.cat(losses)
        dtype = losses[0].dtype
        total = torch.stack([one.to(_wide(dtype)) for one in losses]).sum()
        divisor = loss.divisor(target, total.dtype)
        if divisor is not None:
            # Without a target the mean is NaN, as torch's, and its gradients are zero, as torch's are.
            ctx.scale = torch.where(divisor == 0, torch.zeros_like(divisor), 1 / divisor)
            total = total / divisor
        return total.to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """The gradients of rows, weight and bias."""
        rows, weight, bias, target = ctx.saved_tensors
        if ctx.scale is not None:
            grad = grad * ctx.scale.to(_wide(grad.dtype))
        sums, ctx.sums = ctx.sums, None
        if sums is not None:
            return *sums.scaled(grad, (rows, weight, bias)), None, None, None
        sums = _Sums(rows, weight, bias, ctx.needs_input_grad[:3])
        by_row = ctx.loss.reduction == "none"
        with ctx.loss.autocast.entered():
            _run_chunks(rows, weight, bias, target, ctx.loss, ctx.num_chunks, sums, grad if by_row else None)
        scale = grad.new_ones(()) if by_row else grad
        return *sums.scaled(scale, (rows, weight, bias)), None, None, None
