"""A flat buffer of gradients that are all-reduced in one message, with flags for what each rank has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.host_copies import read_all
from lightning_hybrid.step.objects.tensors import gradient_dtype

if TYPE_CHECKING:
    from lightning_hybrid.slow_links.average import CompressedAverage, PendingAverage


class GradientBucket:
    """Parameters whose gradients are all-reduced in one message.

    Attributes:
        indices: positions of the parameters in the reducer's order.
        flat: the message: the gradients, then the flags.
        views: view of each gradient in `flat`, with the shape and strides of its parameter.
        flags: one per parameter (0 no gradient, 1 dense, 2 * ranks sparse), and one for unbucketed gradients.
        num_missing: number of parameters that the armed backward has not reached.
        work: the all-reduce in flight, or another average.
        is_cast: the message has another dtype than the gradients, which are copied from it when it has arrived.
    """

    def __init__(
        self,
        indices: Sequence[int],
        parameters: Sequence[nn.Parameter],
        example: Tensor,
        dtype: torch.dtype | None = None,
    ) -> None:
        first = parameters[0] if parameters else example
        numel = sum(parameter.numel() for parameter in parameters)
        self.indices = indices
        self.parameters = parameters
        self.flat = torch.zeros(numel + len(parameters) + 1, dtype=dtype or first.dtype, device=first.device)
        self.is_cast = self.flat.dtype != gradient_dtype(first)
        self.views: list[Tensor] = []
        self._layouts: list[tuple[tuple[int, ...], int]] = []
        offset = 0
        for parameter in parameters:
            # The strides of `empty_like` have no gaps, even where the parameter's have.
            strides = torch.empty_like(parameter, device="meta").stride()
            self._layouts.append((strides, offset))
            self.views.append(self.flat.as_strided(parameter.shape, strides, offset))
            offset += parameter.numel()
        self.flags = self.flat[offset:].real
        self.num_missing = 0
        self._num_ranks = 1  # which average the message
        self._is_complete = False  # this rank had a dense gradient for every parameter
        self.work: dist.Work | PendingAverage | None = None
        self._received: tuple[bool, dict[int, Tensor]] | None = None
        self._nbytes = self.flat.untyped_storage().nbytes()

    @property
    def is_launched(self) -> bool:
        """Whether its message is on the way, or has arrived."""
        return self.work is not None or self._received is not None

    def arm(self, num_missing: int) -> None:
        """Begins a backward that will reach so many of the parameters."""
        self.num_missing = num_missing

    def reached(self) -> None:
        """Counts one of the parameters that the backward has reached."""
        self.num_missing -= 1

    def launch(
        self,
        group: dist.ProcessGroup,
        names: Sequence[str],
        average: CompressedAverage | None,
        *,
        has_unbucketed: bool,
    ) -> None:
        """Starts to average what the parameters have now.

        They are all-reduced unless there is another ``average``. ``has_unbucketed`` says whether this rank has a
        gradient that is in no bucket.
        """
        self._num_ranks = group.size()
        self._fill(self._num_ranks, has_unbucketed)
        if average is None:
            self.work = dist.all_reduce(self.flat, group=group, async_op=True)
        else:
            self.work = average.launch(names, self.views, self.flags)

    def wait(self) -> None:
        """Waits for the message; `take` must follow."""
        assert self.work is not None
        self.work.wait()
        self.work = None

    def take(self, sums: Sequence[float]) -> None:
        """Sets the averages as `grad`, by the sums of the flags."""
        *flags, has_unbucketed = sums
        sparse = {}
        if self.is_cast or not self._is_complete or max(flags, default=0) > self._num_ranks:
            members = zip(self.indices, self.parameters, self.views, flags, strict=True)
            for index, parameter, view, flag in members:
                if flag > 1.5 * self._num_ranks:
                    sparse[index] = view
                elif flag > 0:
                    self._set_average(parameter, view)
        self._received = has_unbucketed > 0, sparse

    @property
    def averaged(self) -> list[nn.Parameter]:
        """The parameters whose `grad` is their average, once the message has arrived."""
        assert self._received is not None
        return [p for index, p in zip(self.indices, self.parameters, strict=True) if index not in self._received[1]]

    def taken(self) -> tuple[bool, dict[int, Tensor]] | None:
        """Returns what has arrived, once: None if nothing has.

        That is whether some rank has a gradient outside all buckets; and for parameters whose gradient is sparse on
        some rank, the average of the dense gradients, of the same shape, by index.
        """
        received, self._received = self._received, None
        return received

    def abandon(self) -> None:
        """Waits for the message, if it is on the way, and drops it."""
        if self.work is not None:
            self.work.wait()
        self.work = self._received = None

    def free(self) -> None:
        """Frees the memory of the message until it is filled again."""
        self.flat.untyped_storage().resize_(0)

    def _set_average(self, parameter: nn.Parameter, view: Tensor) -> None:
        if not self.is_cast:
            parameter.grad = view
        elif parameter.grad is None or parameter.grad.is_sparse:
            parameter.grad = view.to(gradient_dtype(parameter))
        else:
            parameter.grad.copy_(view)

    def _fill(self, size: int, has_unbucketed: bool) -> None:
        """Copies the divided gradients of this rank into the bucket; `grad` becomes the view at once.

        Dividing while copying costs no separate pass, and half precision does not overflow in the sum.
        """
        if not self.flat.untyped_storage().nbytes():
            self.flat.untyped_storage().resize_(self._nbytes)
        self._is_complete = True
        flags = []
        storage = self.flat.untyped_storage().data_ptr()
        for index, parameter in enumerate(self.parameters):
            view, gradient = self.views[index], parameter.grad
            if view.untyped_storage().data_ptr() != storage:  # the user wrote `parameter.grad.data = ...`
                view = self.views[index] = self.flat.as_strided(parameter.shape, *self._layouts[index])
            if gradient is None or gradient.is_sparse:
                self._is_complete = False
                view.zero_()
                # More than all dense ones together, also after rounding: bfloat16 cannot count beyond 256.
                flags.append(0.0 if gradient is None else 2.0 * size)
                continue
            if gradient.shape != view.shape:  # torch would give the view that shape, over its neighbours
                raise RuntimeError(
                    f"a gradient of shape {tuple(gradient.shape)} is to be averaged over replicas where"
                    f" {tuple(view.shape)} is expected; set it to a tensor of the parameter's shape"
                )
            flags.append(1.0)
            # With `zero_grad(set_to_none=False)` the backward has accumulated into the view itself.
            # Divided in the wider of both dtypes, and rounded once.
            torch.div(gradient.to(torch.promote_types(gradient.dtype, view.dtype)), size, out=view)
            if gradient is not view and not self.is_cast:
                parameter.grad = view
        if self._is_complete:
            self.flags.fill_(1.0)  # no copy from the host, for which a GPU would stop
            self.flags[-1] = float(has_unbucketed)
        else:
            self.flags.copy_(torch.tensor([*flags, float(has_unbucketed)]))


def receive(buckets: Sequence[GradientBucket]) -> None:
    """Waits for messages that are on the way, and sets the averages as `grad`; the host reads all flags at once."""
    waiting = [bucket for bucket in buckets if bucket.work is not None]
    for bucket in waiting:
        bucket.wait()
    for bucket, sums in zip(waiting, read_all([bucket.flags for bucket in waiting]), strict=True):
        bucket.take(sums.tolist())
