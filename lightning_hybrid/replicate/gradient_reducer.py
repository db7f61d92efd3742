"""Averages gradients over ranks that hold copies of the same parameters, while the backward is still running.

    backward      layer 4   layer 3   layer 2   layer 1
    bucket        [-- 0 --] [------- 1 -------] [-- 2 --]
    all_reduce             [... 0 ...]         [..... 1 .....][... 2 ...]
                                                         finish() waits for the rest

A reducer that guesses from forwards and backwards which gradients are final guesses wrong as soon as a pipeline
interleaves them. This one is told: `arm()` before the backward that completes the gradients, `finish()` after it.

[Note: flags] Ranks may disagree about which parameters have a gradient: a branch that one batch did not take, a layer
that was frozen on one rank only. No rank may decide alone what to send, or the others wait for ever. So what is sent is
agreed in advance, and every flat buffer ends with flags that are summed along with the gradients: one per parameter and
one that says "I have a gradient that no bucket has room for". All ranks read the same sums, and draw the same
conclusions from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_hybrid.replicate.sparse_gradients import average_sparse
from lightning_hybrid.step.objects.gradient_hooks import GradientHook


class GradientObserver(Protocol):
    """Sees gradients on both sides of their average; each parameter once per step on either side."""

    def before_average(self, parameters: Sequence[nn.Parameter]) -> None:
        """`grad` of these parameters is the final one of this rank alone; None where it has none."""

    def after_average(self, parameters: Sequence[nn.Parameter]) -> None:
        """`grad` of these parameters is the average; None where no rank has one."""


class GradientReducer:
    """Averages gradients over a process group, in buckets that travel during the backward.

        reducer.arm()
        loss.backward()    # the last one before the optimizer's step; earlier ones accumulate unarmed
        reducer.finish()

    What is guaranteed after `finish()`, on every rank alike:

    * `grad` is the sum of all ranks' gradients, each divided by the number of ranks (or `divisor`). What was
      accumulated in earlier backwards counts in. A rank without a gradient counts as zeros.
    * A parameter that has a gradient on no rank has None, as in one process.
    * Ranks need not agree on which parameters are frozen or were used: nothing hangs, and `requires_grad` may change
      between steps. They do need the same parameters in the same order, and the same calls.
    * Sparse gradients (`nn.Embedding(sparse=True)`) stay sparse; they are gathered, not summed as dense zeros.

    Dense gradients are views of flat buffers that the reducer owns and reuses: clone what should outlive the
    next step. With a group of one rank nothing happens at all.

    Args:
        parameters: FQN and parameter, in the order of the forward. A parameter that is listed twice counts once.
        group: the ranks that hold copies of the parameters, e.g. `mesh.group("data")`.
        bucket_bytes: a bucket is sent once it holds that much.
        first_bucket_bytes: the same for the first bucket; smaller, so that the first message leaves early.
        observer: sees the gradients before and after they are averaged.
        divisor: what sums are divided by, where gradients are sums over more ranks than those of the group; the number
            of ranks of the group if None.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        group: ProcessGroup,
        *,
        bucket_bytes: int = 25 * 2**20,
        first_bucket_bytes: int = 2**20,
        observer: GradientObserver | None = None,
        divisor: int | None = None,
    ) -> None:
        unique: dict[int, tuple[str, nn.Parameter]] = {}
        for name, parameter in parameters:
            unique.setdefault(id(parameter), (name, parameter))
        # The order of the backward: the last parameter gets its gradient first. Buckets and flags keep this order.
        self._names = [name for name, _ in reversed(unique.values())]
        self._parameters = [parameter for _, parameter in reversed(unique.values())]
        self._group = group
        self._size = group.size()
        self._divisor = divisor or self._size
        self._bucket_bytes = bucket_bytes
        self._first_bucket_bytes = first_bucket_bytes
        self.observer = observer

        self._buckets: list[_Bucket] = []
        self._bucket_of: list[_Bucket | None] = [None] * len(self._parameters)
        self._sparse: list[int] = []
        self._outside = list(range(len(self._parameters)))
        self._hooks: dict[int, torch.utils.hooks.RemovableHandle] = {}

        self._armed = False
        self._next = 0  # buckets before this one are on their way
        self._seen = bytearray(len(self._parameters))
        self._wants_room = False

    def arm(self) -> None:
        """Say that the gradients which the next backward accumulates are final.

        The first call is collective: the ranks agree on what is trained at all.

        Raises:
            RuntimeError: armed already.
        """
        if self._size == 1 or not self._parameters:
            return
        if self._armed:
            raise RuntimeError("GradientReducer.arm() was called twice; call finish() after the backward first")
        if not self._buckets:
            self._add_buckets(self._agree())
        self._wants_room = any(map(self._is_trained, self._outside))
        self._seen = bytearray(len(self._parameters))
        self._next = 0
        for bucket in self._buckets:
            bucket.num_missing = 0
            for index in bucket.indices:
                # A frozen parameter takes no hook, so the hook comes with the first step in which it is trained.
                if self._parameters[index].requires_grad:
                    bucket.num_missing += 1
                    if index not in self._hooks:
                        self._hook(index)
        self._armed = True

    @torch.no_grad()
    def finish(self) -> None:
        """Send what is left, wait for everything, and leave the averages in `grad`; collective.

        Raises:
            RuntimeError: not armed.
        """
        if self._size == 1 and self._divisor > 1:
            gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
            if gradients:
                torch._foreach_div_(gradients, float(self._divisor))
        if self._size == 1 or not self._parameters:
            return
        if not self._armed:
            raise RuntimeError("GradientReducer.finish() was called without arm(); call arm() before the last backward")
        self._armed = False
        while self._next < len(self._buckets):
            self._launch_next()
        room_wanted, sparse = self._settle(self._buckets)
        if room_wanted:
            # A parameter was unfrozen since the ranks agreed; see [Note: flags].
            self._add_buckets(self._agree())
            added = self._buckets[self._next :]
            while self._next < len(self._buckets):
                self._launch_next()
            sparse |= self._settle(added)[1]
        self._average_sparse(sparse)
        if self.observer is not None:
            for bucket in self._buckets:
                self.observer.after_average([self._parameters[i] for i in bucket.indices if i not in sparse])
        if sparse:
            # They were found in a bucket; from now on they travel alone.
            self._sparse = sorted({*self._sparse, *sparse})
            self._rebuild()

    def reduce(self) -> None:
        """Average the gradients that are there, without a backward; collective."""
        self.arm()
        self.finish()

    def close(self) -> None:
        """Remove the hooks; the reducer is of no use afterwards, the gradients stay."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self._buckets.clear()

    # --- sending -----------------------------------------------------------------------------------------------------

    def _hook(self, index: int) -> None:
        self._hooks[index] = self._parameters[index].register_post_accumulate_grad_hook(
            GradientHook(partial(self._on_gradient, index), lambda: not self._armed)
        )

    def _on_gradient(self, index: int, parameter: Tensor) -> None:
        if not self._armed:
            return
        bucket = self._bucket_of[index]
        if bucket is None:
            return
        if self._seen[index]:
            if bucket.work is None:
                return
            raise RuntimeError(
                f"{self._names[index]} got another gradient after its average was under way; arm only the last "
                "backward, and set use_reentrant=False where a checkpointed part shares this parameter"
            )
        self._seen[index] = 1
        bucket.num_missing -= 1
        if not bucket.num_missing:
            # Collectives match by their order, so a bucket that is full waits for the ones before it.
            while self._next < len(self._buckets) and not self._buckets[self._next].num_missing:
                self._launch_next()

    @torch.no_grad()
    def _launch_next(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        if self.observer is not None:
            self.observer.before_average(bucket.parameters)
        bucket.fill(self._size, self._divisor, self._wants_room)
        bucket.work = dist.all_reduce(bucket.flat, group=self._group, async_op=True)

    # --- receiving ---------------------------------------------------------------------------------------------------

    def _settle(self, buckets: Iterable[_Bucket]) -> tuple[bool, dict[int, Tensor]]:
        """Wait for buckets and hand their averages out.

        Returns:
            Whether some rank has a gradient outside all buckets, and where some rank's gradient is sparse: the average
            of the dense rest by index.
        """
        room_wanted = False
        sparse = {}
        for bucket in buckets:
            assert bucket.work is not None
            bucket.work.wait()
            bucket.work = None
            *flags, wants_room = bucket.flags.tolist()
            room_wanted |= wants_room > 0
            if bucket.is_whole and max(flags, default=0) <= self._size:
                continue
            for index, parameter, view, flag in zip(
                bucket.indices, bucket.parameters, bucket.views, flags, strict=True
            ):
                if flag > 1.5 * self._size:
                    sparse[index] = view
                elif flag > 0:
                    parameter.grad = view
        return room_wanted, sparse

    def _average_sparse(self, found: dict[int, Tensor]) -> None:
        for index in sorted({*self._sparse, *found}):
            parameter, dense = self._parameters[index], found.get(index)
            if self.observer is not None and dense is None:
                self.observer.before_average([parameter])
            # In the step in which it is found, a dense gradient of this rank is in the bucket's average already.
            gradient = None if dense is not None and parameter.grad is dense else parameter.grad
            average = average_sparse(gradient, parameter, self._group)
            if dense is not None:
                assert average is not None
                average = (average + dense.to_sparse(1)).coalesce()
            parameter.grad = average
            if self.observer is not None:
                self.observer.after_average([parameter])

    # --- agreeing ----------------------------------------------------------------------------------------------------

    def _is_trained(self, index: int) -> bool:
        parameter = self._parameters[index]
        return parameter.requires_grad or parameter.grad is not None

    def _agree(self) -> list[int]:
        """Which of the parameters outside all buckets are trained on some rank; collective."""
        trained = torch.tensor(
            [float(self._is_trained(index)) for index in self._outside], device=self._parameters[0].device
        )
        dist.all_reduce(trained, group=self._group)
        return [index for index, flag in zip(self._outside, trained.tolist(), strict=True) if flag]

    def _rebuild(self) -> None:
        indices = [i for i, bucket in enumerate(self._bucket_of) if bucket is not None and i not in self._sparse]
        self._buckets.clear()
        self._bucket_of = [None] * len(self._parameters)
        self._add_buckets(indices)

    def _add_buckets(self, indices: Sequence[int]) -> None:
        """Put parameters into buckets behind the ones that exist; one dtype and device per bucket."""
        open_buckets: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        num_bytes: dict[tuple[torch.dtype, torch.device], int] = {}
        groups: list[list[int]] = []
        for index in indices:
            parameter = self._parameters[index]
            key = (parameter.dtype, parameter.device)
            open_buckets.setdefault(key, []).append(index)
            num_bytes[key] = num_bytes.get(key, 0) + parameter.numel() * parameter.element_size()
            if num_bytes[key] >= (self._bucket_bytes if self._buckets or groups else self._first_bucket_bytes):
                groups.append(open_buckets.pop(key))
                del num_bytes[key]
        groups.extend(open_buckets.values())
        if not groups and not self._buckets:
            groups.append([])  # nothing is trained yet; the flag that says otherwise needs a bucket all the same
        for group in groups:
            bucket = _Bucket(group, [self._parameters[index] for index in group], self._parameters[0])
            self._buckets.append(bucket)
            for index in group:
                self._bucket_of[index] = bucket
        inside = {*self._sparse, *(i for i, bucket in enumerate(self._bucket_of) if bucket is not None)}
        self._outside = [index for index in range(len(self._parameters)) if index not in inside]


class _Bucket:
    """Parameters whose gradients travel in one message.

    Attributes:
        indices: where the parameters are in the reducer's order.
        flat: the message: the gradients, then the flags.
        views: the place of each gradient in `flat`, with the shape and strides of its parameter.
        flags: one per parameter (0 no gradient, 1 a dense one, 2 * ranks a sparse one) and the wish for room.
        num_missing: parameters that the armed backward has not reached.
        is_whole: this rank had a dense gradient for every parameter.
        work: the message under way.
    """

    def __init__(self, indices: Sequence[int], parameters: Sequence[nn.Parameter], example: Tensor) -> None:
        first = parameters[0] if parameters else example
        numel = sum(parameter.numel() for parameter in parameters)
        self.indices = indices
        self.parameters = parameters
        self.flat = torch.zeros(numel + len(parameters) + 1, dtype=first.dtype, device=first.device)
        self.views: list[Tensor] = []
        self._places: list[tuple[tuple[int, ...], int]] = []
        offset = 0
        for parameter in parameters:
            # What `empty_like` answers has no gaps, even where the parameter has some.
            strides = torch.empty_like(parameter, device="meta").stride()
            self._places.append((strides, offset))
            self.views.append(self.flat.as_strided(parameter.shape, strides, offset))
            offset += parameter.numel()
        self.flags = self.flat[offset:].real
        self.num_missing = 0
        self.is_whole = False
        self.work: dist.Work | None = None

    def fill(self, size: int, divisor: int, wants_room: bool) -> None:
        """Copy the gradients of this rank in, divided; `grad` becomes the view at once.

        Dividing on the way costs no pass of its own, and half precision does not overflow in the sum.
        """
        self.is_whole = True
        flags = []
        storage = self.flat.untyped_storage().data_ptr()
        for index, parameter in enumerate(self.parameters):
            view, gradient = self.views[index], parameter.grad
            if view.untyped_storage().data_ptr() != storage:  # the user wrote `parameter.grad.data = ...`
                view = self.views[index] = self.flat.as_strided(parameter.shape, *self._places[index])
            if gradient is None or gradient.is_sparse:
                self.is_whole = False
                view.zero_()
                # More than all dense ones together, also after rounding: bfloat16 cannot count beyond 256.
                flags.append(0.0 if gradient is None else 2.0 * size)
                continue
            flags.append(1.0)
            # With `zero_grad(set_to_none=False)` the backward has accumulated into the view itself.
            torch.div(gradient, divisor, out=view)
            if gradient is not view:
                parameter.grad = view
        if self.is_whole:
            self.flags.fill_(1.0)  # no copy from the host, for which a GPU would stop
            self.flags[-1] = float(wants_room)
        else:
            self.flags.copy_(torch.tensor([*flags, float(wants_room)]))
