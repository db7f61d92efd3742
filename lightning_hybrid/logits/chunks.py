"""A loss of logits, computed in chunks of their rows: no more than one chunk of logits exists at a time.

    rows of hidden states:   chunk 0           chunk 1          ...
    forward                  logits ─► loss    logits ─► loss   ...      total = sum of the chunks' losses
                               └► gradient       └► gradient    ...      of rows, weight and bias, added up

The gradients are computed in the forward, where the logits are, and multiplied by the incoming gradient in the backward
(Liger Kernel's fused linear cross entropy, Hsu et al. 2024, section 3.2). Where that gradient is not one number (losses
of single rows), or the gradient of the weight is larger than the logits, the backward computes each chunk again.

A head whose vocabulary tensor ranks shard makes chunks of its shard of the logits, whose losses the rules of sharded
logits add up over the ranks; the gradients of the rows are summed once for all chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lightning_hybrid.logits.sharded import VocabularyTensor, local_gradient, represent
from lightning_hybrid.logits.vocabulary import Vocabulary, VocabularyShard
from lightning_hybrid.step.tracing.functions import NotIntercepted
from lightning_hybrid.step.tracing.mode import user_line

RowOp = Callable[[Tensor], Tensor]
Around = Callable[[nn.Module], AbstractContextManager[Any]]
# Fewer make products slow, and the sums of the weight's gradient over chunks; more save less memory.
_ROWS_OF_CHUNK = {"cpu": (256, 512), "cuda": (1024, 2048)}
_LOSSES = frozenset({"cross_entropy", "nll_loss"})


@dataclass(frozen=True)
class Autocast:
    """The state of autocast for one type of device."""

    device_type: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, device: torch.device) -> Autocast:
        """The state of the code that runs."""
        kind = device.type
        return cls(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))

    def entered(self) -> torch.autocast:
        """A context with this state."""
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=self.enabled)

    def dtype_of_product(self, x: Tensor) -> torch.dtype:
        """The dtype of a linear's result for the input ``x``, of any shape."""
        return self.dtype if self.enabled and x.is_floating_point() and x.dtype is not torch.float64 else x.dtype


class FullRows:
    """The rows of a head's weight where each rank has them all."""

    def logits(self, local: Tensor) -> Tensor:
        """Logits of shape (rows, vocabulary), of what this rank's rows of the weight make of hidden states."""
        return local

    def of_rank(self, grad: Tensor) -> Tensor:
        """The gradient by this rank's rows, from the gradient by logits of shape (rows, vocabulary)."""
        return grad

    def summed(self, addend: Tensor) -> Tensor:
        """What the rows of all ranks add to a gradient of any shape."""
        return addend


class ShardedRows(FullRows):
    """The rows of a head's weight that tensor ranks shard."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    def logits(self, local: Tensor) -> Tensor:
        """A tensor of shape (rows, vocabulary) that holds this rank's shard."""
        return VocabularyTensor(local, 1, self.vocabulary)

    def of_rank(self, grad: Tensor) -> Tensor:
        """This rank's shard of the gradient of logits of shape (rows, vocabulary)."""
        return local_gradient(grad, 1, self.vocabulary)

    def summed(self, addend: Tensor) -> Tensor:
        """The sum over the ranks, of the same shape."""
        return self.vocabulary.summed(addend)


class Head:
    """An output head, and what its logits are read by.

    Attributes:
        fqn: FQN of the linear.
        has_loss: Whether a loss has read its logits.
        reads: Where operations have read its logits in full, by their names.
        chunks_of: The number of rows of the last loss, and of its chunks; none before the first loss.
    """

    def __init__(self, fqn: str, module: nn.Linear, num_chunks: int | None, around: Around, rows: FullRows) -> None:
        """Takes a linear, its number of chunks if that is given, and a context in which its parameters are full."""
        self.fqn, self.module, self.rows = fqn, module, rows
        self._num_chunks, self._around = num_chunks, around
        self._parameters = dict(module._parameters)
        self.forward: Callable[[Tensor], Tensor] = module.forward
        self.has_loss = False
        self.reads: dict[str, str] = {}
        self.chunks_of: tuple[int, ...] = ()

    @property
    def uses(self) -> tuple[bool, dict[str, str], tuple[int, ...]]:
        """What its logits have been read by so far."""
        return self.has_loss, dict(self.reads), self.chunks_of

    def restore(self, uses: tuple[bool, dict[str, str], tuple[int, ...]]) -> None:
        """Forget later reads than these."""
        self.has_loss, self.reads, self.chunks_of = uses

    def full_logits(self, hidden: Tensor) -> Tensor:
        """Logits of shape (..., vocabulary) from hidden states of shape (..., features); or the ranks' shards."""
        if not isinstance(self.rows, ShardedRows):
            return self.forward(hidden)
        with self._around(self.module):
            vocabulary = self.rows.vocabulary
            weight, bias = self._local()
            full = (None if each is None else represent(each, 0, vocabulary) for each in (weight, bias))
            return F.linear(hidden, *full)  # type: ignore[arg-type]

    def loss(self, rows: Tensor, target: Tensor, loss: RowLoss) -> Tensor:
        """The loss of hidden states of shape (rows, features) and targets of shape (rows,), in chunks."""
        self.has_loss, count = True, self._count(len(rows))
        self.chunks_of = len(rows), count
        with self._around(self.module):
            rows, weight, bias = self._cast(rows, loss.autocast)
            result: Tensor = _LossInChunks.apply(rows, weight, bias, target, loss, count)
        return result

    def map_rows(self, rows: Tensor, function: RowOp, autocast: Autocast) -> Tensor:
        """A function of logits of shape (rows, vocabulary), one value per row, in chunks, without gradients."""
        with self._around(self.module), autocast.entered(), torch.no_grad():
            rows, weight, bias = self._cast(rows, autocast)
            chunks = rows.tensor_split(self._count(len(rows)))
            return torch.cat([function(self.rows.logits(F.linear(chunk, weight, bias))) for chunk in chunks])

    def read_in_full(self, operation: str) -> None:
        """Note that an operation reads logits in full."""
        if operation in _LOSSES:
            self.has_loss = True
        self.reads.setdefault(operation, user_line())

    def _local(self) -> tuple[Tensor, Tensor | None]:
        """This rank's weight and bias; a layer that runs sharded has put tensors of the full shape in their place."""
        found: dict[str, Any] = dict(self.module._parameters)
        weight, bias = (
            self._parameters[name] if isinstance(found[name], VocabularyShard) else found[name]
            for name in ("weight", "bias")
        )
        assert weight is not None
        return weight, bias

    def _cast(self, rows: Tensor, autocast: Autocast) -> tuple[Tensor, Tensor, Tensor | None]:
        """Casts as a linear under autocast makes them, but once for all chunks."""
        dtype, (weight, bias) = autocast.dtype_of_product(rows), self._local()
        return rows.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)

    def _count(self, num_rows: int) -> int:
        """The number of chunks; by default such that a chunk has half as many rows as features, within limits."""
        least, most = _ROWS_OF_CHUNK.get(self.module.weight.device.type, _ROWS_OF_CHUNK["cuda"])
        count = self._num_chunks or math.ceil(num_rows / min(max(self.module.in_features // 2, least), most))
        return max(1, min(count, num_rows))


@dataclass(frozen=True)
class RowLoss:
    """A loss of rows of logits and their targets."""

    function: Callable[..., Tensor]  # ``cross_entropy`` or ``nll_loss``
    class_weight: Tensor | None  # of shape (vocabulary,), or None
    ignore_index: int  # the target of rows without a loss
    reduction: str  # "mean", "sum" or "none"
    options: dict[str, Any]  # further keyword arguments of the function
    row_ops: tuple[RowOp, ...]  # applied to the logits first, such as a cast; each works on every row by itself
    autocast: Autocast  # as at the call
    vocabulary: FullRows  # the rows of the head's weight that this rank has

    def of(self, logits: Tensor, target: Tensor) -> Tensor:
        """The sum, or the loss of each row without a reduction, for logits of shape (rows, vocabulary)."""
        for op in self.row_ops:
            logits = op(logits)
        options = {**self.options, "weight": self.class_weight, "ignore_index": self.ignore_index}
        return self.function(logits, target, reduction="none" if self.reduction == "none" else "sum", **options)

    def divisor(self, target: Tensor, dtype: torch.dtype) -> Tensor:
        """What a mean divides the sum by, a scalar: the weights of all rows, of shape (rows,), that are not ignored."""
        counted = target != self.ignore_index
        if self.class_weight is None:
            return counted.sum().to(dtype)
        weights = self.class_weight.detach()[target.masked_fill(~counted, 0)]
        return weights.masked_fill(~counted, 0).sum().to(dtype)

    def run(
        self,
        head: tuple[Tensor, Tensor, Tensor | None],
        target: Tensor,
        num_chunks: int,
        sums: _Sums | None,
        grads: Tensor | None = None,
    ) -> list[Tensor]:
        """The losses of the chunks, of shape (rows of the chunk,); their gradients are added to ``sums``.

        ``grads`` are those of rows' losses, of shape (rows,).
        """
        rows, weight, bias = head
        losses = []
        for span in _spans(len(rows), num_chunks):
            logits = self.vocabulary.logits(F.linear(rows[span], weight, bias))
            if sums is None:
                losses.append(self.of(logits, target[span]))
                continue
            with torch.enable_grad():
                logits.requires_grad_()
                found = self.of(logits, target[span])
            (grad,) = torch.autograd.grad(found, logits, None if grads is None else grads[span])
            losses.append(found.detach())
            del logits, found  # before the next chunk is allocated
            sums.add(span, rows, weight, self.vocabulary.of_rank(grad))
        if sums is not None and sums.rows is not None:
            sums.rows = self.vocabulary.summed(sums.rows)
        return losses


def _spans(num_rows: int, num_chunks: int) -> Iterator[slice]:
    each, more = divmod(num_rows, num_chunks)
    start = 0
    for chunk in range(num_chunks):
        stop = start + each + (chunk < more)
        yield slice(start, stop)
        start = stop


class _Sums:
    """The gradients of rows, weight and bias, added up over chunks; None where one is not needed."""

    def __init__(self, rows: Tensor, weight: Tensor, bias: Tensor | None, needed: Sequence[bool]) -> None:
        self.rows = torch.empty_like(rows) if needed[0] else None
        self.weight = torch.empty_like(weight, dtype=_wide(weight.dtype)) if needed[1] else None
        self.bias = torch.zeros_like(bias, dtype=_wide(bias.dtype)) if bias is not None and needed[2] else None
        self._is_first = True

    def add(self, span: slice, rows: Tensor, weight: Tensor, grad: Tensor) -> None:
        """Adds what the gradient of one chunk of logits, of shape (rows, vocabulary), gives."""
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
        """Multiplies by a scalar, in place; returns gradients of the dtypes of ``like``."""
        sums = (self.rows, self.weight, self.bias)
        return tuple(
            None if total is None or other is None else total.mul_(scale).to(other.dtype)
            for total, other in zip(sums, like, strict=True)
        )


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which many addends of a dtype are summed."""
    return torch.promote_types(dtype, torch.float32)


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
        losses = loss.run((rows, weight, bias), target, num_chunks, ctx.sums)
        ctx.save_for_backward(rows, weight, bias, target)
        ctx.loss, ctx.num_chunks, ctx.scale = loss, num_chunks, None
        if loss.reduction == "none":
            return torch.cat(losses)
        dtype = losses[0].dtype
        total = torch.stack([one.to(_wide(dtype)) for one in losses]).sum()
        if loss.reduction == "mean":
            divisor = loss.divisor(target, total.dtype)
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
            ctx.loss.run((rows, weight, bias), target, ctx.num_chunks, sums, grad if by_row else None)
        scale = grad.new_ones(()) if by_row else grad
        return *sums.scaled(scale, (rows, weight, bias)), None, None, None
