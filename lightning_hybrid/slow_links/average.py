"""The average of a message of gradients over ranks, in compressed form, with error feedback.

    message of a rank    gradients / number of replicas + feedback of the rank
    result               the sum of what the ranks' messages say in compressed form
    feedback             message - this rank's share of the result

So nothing is lost: at any time the results so far and the feedback of all ranks add up to the gradients so far (Seide
et al. 2014; Karimireddy et al., arXiv 1901.09847). Vectors, and parameters that must not depend on what else is in a
message, are sent as they are, together with the flags.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from math import prod
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.slow_links.method import Method, Piece


class RowsOfRanks(Protocol):
    """The form of a gradient in a message: (ranks, elements of the largest shard), each row padded."""

    def join(self, rows: Tensor) -> Tensor:
        """The gradient, of the full shape, without the padding."""

    def split(self, rows: Tensor, gradient: Tensor) -> None:
        """Write a gradient, of the full shape or flat, into rows of shape (ranks, elements of the largest shard)."""


class CompressedAverage:
    """Averages gradients over the ranks of one group.

    Attributes:
        method: How messages are compressed.
        group: The ranks.
        loss_scale: Returns the factor of the gradients, which may change from step to step.
        errors: Feedback of this rank by FQN, of the gradient's shape; without the factor.
    """

    def __init__(
        self,
        method: Method,
        group: dist.ProcessGroup,
        *,
        is_compressing: Callable[[], bool] = lambda: True,
        loss_scale: Callable[[], float] = lambda: 1.0,
        uncompressed: Collection[str] = (),
        full_shapes: Mapping[str, Sequence[int]] | None = None,
        step: Callable[[], int] | None = None,
    ) -> None:
        """Keep the method and the ranks; there is no feedback yet.

        There is no feedback yet. ``is_compressing`` is the same on all ranks. ``full_shapes`` are of parameters whose
        gradients here are shards: what is compressed does not depend on how many ranks share a parameter. ``step``
        numbers the optimizer steps, where one whose gradients are not finite is skipped, after which the loss scale is
        smaller; it is None where none is skipped.
        """
        self.method, self.group = method, group
        self._is_compressing, self.loss_scale = is_compressing, loss_scale
        self._uncompressed, self._full_shapes = frozenset(uncompressed), full_shapes or {}
        self.errors: dict[str, Tensor] = {}
        self._step = step
        self._begun: tuple[int, float, dict[str, Tensor]] | None = None  # the latest step, its scale, feedback before

    def settle(self) -> None:
        """Restore the feedback before the latest optimizer step if that was skipped; called before a message too."""
        if self._step is None:
            return
        step, scale = self._step(), self.loss_scale()
        if self._begun is not None and self._begun[0] == step:
            return
        if self._begun is not None and scale < self._begun[1]:  # the results of no message of it were used
            self.errors = dict(self._begun[2])
        self._begun = step, scale, dict(self.errors)

    def feedback_kept(self) -> Callable[[], None]:
        """Return a function that restores the feedback as it is now."""
        errors = dict(self.errors)

        def restore() -> None:
            self.errors = dict(errors)

        return restore

    def selects(self, name: str, dtype: torch.dtype, shape: Sequence[int]) -> bool:
        """Whether the gradient of a parameter, here of this shape, is compressed in this step."""
        if not dtype.is_floating_point or not shape or not prod(shape) or not self._is_compressing():
            return False
        rows, *others = self._full_shapes.get(name, shape)
        return name not in self._uncompressed and self.method.compresses(dtype, rows, prod(others))

    def add_error(self, name: str, gradient: Tensor) -> None:
        """Add the feedback of a checkpoint of another layout to a gradient, of any shape, that is sent uncompressed."""
        if self._is_compressing() and (error := self.errors.pop(name, None)) is not None:
            gradient.add_(error, alpha=self.loss_scale())

    def launch(self, names: Sequence[str], gradients: Sequence[Tensor], flags: Tensor) -> PendingAverage:
        """Start to average gradients over the ranks; does not wait.

        Gradients, of any shapes, are divided by the number of replicas, and hold the average afterwards.
        ``flags`` has a number for
        each, and more, which are summed uncompressed; where the sum is 0, no rank has a gradient, and feedback waits
        for the next message.
        """
        return PendingAverage(self, names, gradients, flags)

    def start(
        self, names: Sequence[str], gradients: Sequence[Tensor], forms: Sequence[RowsOfRanks] | None = None
    ) -> PendingSum:
        """Start to sum gradients that `selects` has selected; does not wait.

        Gradients have shape (rows, ...), and hold the sum afterwards. Where each rank needs only its own row of
        gradients of shape (ranks, elements of the largest shard), ``forms`` say what the rows of each hold.
        """
        return PendingSum(self, names, gradients, forms)


class PendingSum:
    """A sum of gradients in compressed form that was started."""

    def __init__(
        self,
        average: CompressedAverage,
        names: Sequence[str],
        gradients: Sequence[Tensor],
        forms: Sequence[RowsOfRanks] | None,
    ) -> None:
        self._average, self._names, self._gradients = average, names, gradients
        average.settle()
        method, self._scale = average.method, average.loss_scale()
        # Rows of ranks one after the other, for methods that send each rank its row.
        self._in_rows = forms is not None and not method.needs_matrices
        self._flat = self._joined(gradients)
        if average.errors:
            like = zip(names, gradients, strict=True)
            errors = self._joined([average.errors.get(name, torch.zeros_like(each)) for name, each in like])
            self._flat.add_(errors, alpha=self._scale)
        self._given = self._flat.clone() if method.has_feedback else None
        self._finish = method.start(self._flat, self._pieces(forms), average.group, scatter=self._in_rows)

    def _joined(self, tensors: Sequence[Tensor]) -> Tensor:
        if self._in_rows:
            return torch.cat([tensor.reshape(len(tensor), -1) for tensor in tensors], 1).view(-1)
        return torch.cat([tensor.reshape(-1) for tensor in tensors])

    def _separated(self, flat: Tensor) -> list[Tensor]:
        if self._in_rows:
            rows = flat.view(len(self._gradients[0]), -1)
            return list(rows.split([gradient.shape[1] for gradient in self._gradients], 1))
        pieces = flat.split([gradient.numel() for gradient in self._gradients])
        return [piece.view(each.shape) for piece, each in zip(pieces, self._gradients, strict=True)]

    def _pieces(self, forms: Sequence[RowsOfRanks] | None) -> list[Piece]:
        if self._in_rows:
            return []
        separated = self._separated(self._flat)
        if forms is None:
            matrices = [_matrix(piece) for piece in separated]
            return [Piece(name, matrix, matrix.copy_) for name, matrix in zip(self._names, matrices, strict=True)]
        return [
            Piece(name, _matrix(form.join(rows)), partial(form.split, rows))
            for name, rows, form in zip(self._names, separated, forms, strict=True)
        ]

    def finish(self, has_gradient: Sequence[bool] | None = None) -> None:
        """Wait for the sum, and keep what it leaves out for the next message.

        Feedback waits where no rank has a gradient; None means that all have some.
        """
        share, given = self._finish(), self._given
        if share is not None and given is not None:
            missing = (given - share) / self._scale
            # After an overflow the step is skipped, and its gradients do not count.
            is_finite = missing.isfinite().all() & self._flat.isfinite().all()
            unsent = self._separated(given / self._scale)
            for index, (name, error) in enumerate(zip(self._names, self._separated(missing), strict=True)):
                if has_gradient is not None and not has_gradient[index]:
                    error = unsent[index]
                before = self._average.errors.get(name)
                before = torch.zeros_like(error) if before is None else before
                self._average.errors[name] = torch.where(is_finite, error, before)
        for gradient, result in zip(self._gradients, self._separated(self._flat), strict=True):
            gradient.copy_(result)


class PendingAverage:
    """An average of gradients that was started; some of them are sent as they are."""

    def __init__(
        self, average: CompressedAverage, names: Sequence[str], gradients: Sequence[Tensor], flags: Tensor
    ) -> None:
        average.settle()
        traffic, group = average.method.traffic, average.group
        self._flags, self._plain, chosen = flags, [], []
        for index, (name, gradient) in enumerate(zip(names, gradients, strict=True)):
            if average.selects(name, gradient.dtype, gradient.shape):
                chosen.append(index)
            else:
                average.add_error(name, gradient)
                self._plain.append(gradient)
            traffic.instead_of(gradient.nbytes, group, scatter=False)
        self._chosen = chosen
        self._exact = torch.cat([*(gradient.reshape(-1) for gradient in self._plain), flags])
        traffic.all_reduce(self._exact, group)
        self._work = dist.all_reduce(self._exact, group=group, async_op=True)
        self._sum = None
        if chosen:
            self._sum = average.start([names[i] for i in chosen], [gradients[i] for i in chosen])

    def wait(self) -> None:
        """Wait; gradients and flags hold the results."""
        self._work.wait()
        *pieces, flags = self._exact.split([*(gradient.numel() for gradient in self._plain), self._flags.numel()])
        for gradient, piece in zip(self._plain, pieces, strict=True):
            gradient.copy_(piece.view(gradient.shape))
        self._flags.copy_(flags.real)
        if self._sum is not None:
            found = self._flags.tolist()
            self._sum.finish([found[index] > 0 for index in self._chosen])


def _matrix(gradient: Tensor) -> Tensor:
    return gradient.reshape(len(gradient), -1)
