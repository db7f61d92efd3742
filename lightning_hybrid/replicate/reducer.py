"""Averages gradients over ranks that hold copies of the same parameters, while the backward is still running.

    backward      layer 4   layer 3   layer 2   layer 1
    bucket        [-- 0 --] [------- 1 -------] [-- 2 --]
    all_reduce             [... 0 ...]         [..... 1 .....][... 2 ...]
                                                         finish() waits for the rest

A reducer that infers from forwards and backwards which gradients are final is wrong as soon as a pipeline interleaves
them. This one is called explicitly: `arm()` before the backward that completes the gradients, `finish()` after it.

[Note: flags] Ranks may disagree about which parameters have a gradient: a branch that one batch did not take, a layer
that was frozen on one rank only. No rank may decide by itself what to send, or the others hang. So the messages are
agreed in advance, and every flat buffer ends with flags that are summed along with the gradients: one per parameter and
one for "this rank has a gradient that is in no bucket". All ranks read the same sums, and draw the same conclusions
from them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_hybrid.replicate.bucket import GradientBucket, receive
from lightning_hybrid.step.objects.tensors import GradientHook, GradientObserver, gradient_dtype

if TYPE_CHECKING:
    from lightning_hybrid.slow_links.average import CompressedAverage


class GradientReducer:
    """Averages gradients over a process group, in buckets that are all-reduced during the backward.

        reducer.arm()
        loss.backward()    # the last one before the optimizer's step; earlier ones accumulate unarmed
        reducer.finish()

    Guarantees after `finish()`, on every rank:

    * `grad` is the sum of all ranks' gradients, each divided by the number of ranks. What was accumulated
      in earlier backwards is included; an average remains what it is. A rank without a gradient counts as zeros.
    * A parameter that has a gradient on no rank has None, as in one process.
    * Ranks need not agree on which parameters are frozen or were used: nothing hangs, and `requires_grad` may change
      between steps. They do need the same parameters in the same order, and the same calls.
    * Sparse gradients (`nn.Embedding(sparse=True)`) stay sparse; they are gathered, not summed as dense zeros.

    Dense gradients are views of flat buffers that the reducer owns and reuses: clone what should outlive the
    next step. With a group of one rank all calls do nothing.

    Args:
        parameters: FQN and parameter, in the order of the forward. A parameter that is listed twice counts once.
        group: the ranks that hold replicas of the parameters, e.g. `mesh.group("data")`.
        bucket_bytes: a bucket is closed once it has that many bytes.
        first_bucket_bytes: the same for the first bucket; smaller, so that the first all-reduce starts early.
        dtype: of the messages, in which gradients are summed; that of the parameters if None.

    Attributes:
        average: how a bucket is averaged; all-reduced as it is if None.
        is_local: whether gradients stay those of this rank: `arm` and `finish` do nothing.
        unaveraged: FQNs of parameters that got a gradient since the latest average, by their ids.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        group: ProcessGroup,
        *,
        bucket_bytes: int = 25 * 2**20,
        first_bucket_bytes: int = 2**20,
        dtype: torch.dtype | None = None,
        copies: Mapping[str, Hashable] | None = None,
    ) -> None:
        unique: dict[int, tuple[str, nn.Parameter]] = {}
        for name, parameter in parameters:
            unique.setdefault(id(parameter), (name, parameter))
        # The order of the backward: the last parameter gets its gradient first. Buckets and flags keep this order.
        self._names = [name for name, _ in reversed(unique.values())]
        self._parameters = [parameter for _, parameter in reversed(unique.values())]
        self._group = group
        self._size = group.size()
        self._dtype = dtype
        self._copies = dict(copies or {})
        self._bucket_bytes = bucket_bytes
        self._first_bucket_bytes = first_bucket_bytes
        self._observer: GradientObserver | None = None
        self.average: CompressedAverage | None = None
        self.is_local = False
        self.unaveraged: dict[int, str] = {}
        self._on_averages: Callable[[Sequence[nn.Parameter]], None] | None = None

        self._buckets: list[GradientBucket] = []
        self._bucket_of: list[GradientBucket | None] = [None] * len(self._parameters)
        self._sparse: list[int] = []
        self._unbucketed = list(range(len(self._parameters)))
        self._hooks: dict[int, torch.utils.hooks.RemovableHandle] = {}

        self._armed = False
        self._next = 0  # the all-reduces of the buckets before this one are launched
        self._has_gradient = bytearray(len(self._parameters))
        self._has_unbucketed = False

    @property
    def names(self) -> list[str]:
        """FQNs of the parameters whose gradients are averaged, in the order that all ranks must share."""
        return self._names

    @property
    def messages(self) -> list[Tensor]:
        """The flat tensors that are sent, one for each bucket; they are kept from the first batch on."""
        return [bucket.flat for bucket in self._buckets]

    def compress(self, average: CompressedAverage) -> None:
        """Sends messages in compressed form from now on."""
        self.average = average

    def observe(self, observer: GradientObserver) -> None:
        """Lets an observer see gradients before and after they are averaged."""
        self._observer = observer

    def call_on_averages(self, call: Callable[[Sequence[nn.Parameter]], None]) -> None:
        """Calls a function with parameters whose averages have arrived, also in the backward; it may free them."""
        self._on_averages = call

    def step_alone(self, is_local: bool) -> None:
        """Leaves this rank's gradients as they are, or averages them, from now on."""
        self.is_local = is_local

    def arm(self) -> None:
        """Announces that the gradients accumulated by the next backward are final.

        The first call is collective: the ranks agree on which parameters are trained.

        Raises:
            RuntimeError: armed already.
        """
        if self._size == 1 or not self._parameters or self.is_local:
            return
        if self._armed:
            raise RuntimeError("GradientReducer.arm() was called twice; call finish() after the backward first")
        if not self._buckets:
            self._add_buckets(self._agree_on_trained())
        self._has_unbucketed = any(map(self._is_trained, self._unbucketed))
        self._has_gradient = bytearray(len(self._parameters))
        self._next = 0
        for bucket in self._buckets:
            # A frozen parameter accepts no hook, so the hook is registered in the first step that trains it.
            trained = [index for index in bucket.indices if self._parameters[index].requires_grad]
            bucket.arm(len(trained))
            for index in trained:
                if index not in self._hooks:
                    self._hook(index)
        self._armed = True

    @torch.no_grad()
    def launch(self) -> list[GradientBucket]:
        """Launches the remaining all-reduces; `finish` must follow.

        Returns:
            The buckets that `receive` may receive before, with those of other reducers.
        """
        while self._next < len(self._buckets):
            self._launch_next()
        return [] if self.steps_early else self._buckets

    @property
    def is_armed(self) -> bool:
        """Whether `finish` must follow."""
        return self._armed

    @property
    def steps_early(self) -> bool:
        """Whether averages are stepped, and freed, as soon as they have arrived."""
        return self._on_averages is not None

    @torch.no_grad()
    def finish(self) -> None:
        """Launches the remaining all-reduces, waits for all, and leaves the averages in `grad`; collective.

        Raises:
            RuntimeError: not armed.
        """
        if self.is_local:
            return
        if self._size == 1 and self._on_averages is not None:
            self._on_averages(self._parameters)
        if self._size == 1 or not self._parameters:
            return
        if not self._armed:
            raise RuntimeError("GradientReducer.finish() was called without arm(); call arm() before the last backward")
        self._armed = False
        self.unaveraged.clear()
        self.launch()
        any_unbucketed, sparse = self._wait_for(self._buckets)
        if any_unbucketed:
            # A parameter was unfrozen since the ranks agreed; [Note: flags].
            self._add_buckets(self._agree_on_trained())
            added = self._buckets[self._next :]
            self.launch()
            sparse |= self._wait_for(added)[1]
        self._average_sparse(sparse)
        for bucket in self._buckets:
            self._show_averages(self._parameters[i] for i in bucket.indices if i not in sparse)
        if sparse:
            # Parameters of a bucket had sparse gradients; from now on they are averaged by themselves.
            self._sparse = sorted({*self._sparse, *sparse})
            self._rebuild()

    def reduce(self) -> None:
        """Averages the present gradients, without a backward; collective."""
        self.arm()
        self.finish()

    def abandon(self) -> None:
        """Ends a backward that has failed on some rank, without averages; all ranks have launched the same messages."""
        self._armed = False
        for bucket in self._buckets:
            bucket.abandon()

    def close(self) -> None:
        """Removes the hooks; the reducer cannot be used afterwards, the gradients stay."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self._buckets.clear()

    # --- sending -----------------------------------------------------------------------------------------------------

    def _hook(self, index: int) -> None:
        hook = GradientHook(partial(self._on_gradient, index), lambda: not self._armed)
        self._hooks[index] = hook.register(self._parameters[index])

    def _on_gradient(self, index: int, parameter: Tensor) -> None:
        if not self._armed:
            if not self.is_local:
                self.unaveraged[id(parameter)] = self._names[index]
            return
        bucket = self._bucket_of[index]
        if bucket is None:
            return
        if self._has_gradient[index]:
            if not bucket.is_launched:
                return
            raise RuntimeError(
                f"{self._names[index]} got another gradient after its average over the replicas had started; arm only"
                " the last backward, and set use_reentrant=False where a checkpointed module shares this parameter"
            )
        self._has_gradient[index] = 1
        bucket.reached()
        if not bucket.num_missing:
            # Collectives match by their order, so a bucket that is full waits for the ones before it.
            while self._next < len(self._buckets) and not self._buckets[self._next].num_missing:
                self._launch_next()

    @torch.no_grad()
    def _launch_next(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        self._show_gradients(bucket.parameters)
        names = [self._names[index] for index in bucket.indices]
        bucket.launch(self._group, names, self.average, has_unbucketed=self._has_unbucketed)
        if self._on_averages is not None and self.average is None:
            for earlier in self._buckets[: self._next - 1]:  # what has arrived; waiting for more could wait for ever
                if isinstance(earlier.work, dist.Work) and earlier.work.is_completed():
                    self._receive([earlier])

    # --- receiving ---------------------------------------------------------------------------------------------------

    def _wait_for(self, buckets: Sequence[GradientBucket]) -> tuple[bool, dict[int, Tensor]]:
        """Waits for buckets and sets their averages as `grad`.

        Returns:
            Whether some rank has a gradient outside all buckets; and for parameters whose gradient is sparse on some
            rank, the average of the dense gradients by index.
        """
        any_unbucketed = False
        sparse: dict[int, Tensor] = {}
        self._receive(buckets)
        for bucket in buckets:
            received = bucket.taken()
            assert received is not None
            any_unbucketed |= received[0]
            sparse |= received[1]
        return any_unbucketed, sparse

    @torch.no_grad()
    def _receive(self, buckets: Sequence[GradientBucket]) -> None:
        """Waits for buckets and sets their averages as `grad`."""
        if self._on_averages is None:
            return receive(buckets)
        for bucket in [each for each in buckets if each.work is not None]:  # one by one, as each may be freed
            receive([bucket])
            self._on_averages(averaged := bucket.averaged)
            if len(averaged) == len(bucket.parameters) and all(p.grad is None for p in averaged):
                bucket.free()

    def _average_sparse(self, found: dict[int, Tensor]) -> None:
        for index in sorted({*self._sparse, *found}):
            parameter, dense = self._parameters[index], found.get(index)
            if dense is None:
                self._show_gradients([parameter])
            # In the step in which it is found, a dense gradient of this rank is in the bucket's average already.
            gradient = parameter.grad
            if dense is not None and gradient is not None and not gradient.is_sparse:
                gradient = None
            average = average_sparse(gradient, parameter, self._group)
            if dense is not None:
                assert average is not None
                average = (average + dense.to(average.dtype).to_sparse(1)).coalesce()
            parameter.grad = average
            self._show_averages([parameter])

    def _show_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        if self._observer is not None:
            for parameter in parameters:
                if parameter.grad is not None:
                    self._observer.before_average(parameter, parameter.grad)

    def _show_averages(self, parameters: Iterable[nn.Parameter]) -> None:
        if self._observer is not None:
            for parameter in parameters:
                if parameter.grad is not None:
                    self._observer.after_average(parameter, parameter.grad)

    # --- agreeing ----------------------------------------------------------------------------------------------------

    def _is_trained(self, index: int) -> bool:
        parameter = self._parameters[index]
        return parameter.requires_grad or parameter.grad is not None

    def _agree_on_trained(self) -> list[int]:
        """Returns the parameters outside all buckets that are trained on some rank; collective."""
        trained = torch.tensor(
            [float(self._is_trained(index)) for index in self._unbucketed], device=self._parameters[0].device
        )
        dist.all_reduce(trained, group=self._group)
        return [index for index, flag in zip(self._unbucketed, trained.tolist(), strict=True) if flag]

    def _rebuild(self) -> None:
        indices = [i for i, bucket in enumerate(self._bucket_of) if bucket is not None and i not in self._sparse]
        self._buckets.clear()
        self._bucket_of = [None] * len(self._parameters)
        self._add_buckets(indices)

    def _add_buckets(self, indices: Sequence[int]) -> None:
        """Appends buckets with these parameters; one dtype, device and key of copies per bucket."""
        open_buckets: dict[Hashable, list[int]] = {}
        num_bytes: Counter[Hashable] = Counter()
        groups: list[list[int]] = []
        for index in indices:
            parameter = self._parameters[index]
            copies = self._copies.get(self._names[index])
            key = (parameter.dtype, parameter.device, copies)
            open_buckets.setdefault(key, []).append(index)
            num_bytes[key] += parameter.numel() * parameter.element_size()
            is_first = not self._buckets and not groups and copies is None
            if num_bytes[key] >= (self._first_bucket_bytes if is_first else self._bucket_bytes):
                groups.append(open_buckets.pop(key))
                del num_bytes[key]
        groups.extend(open_buckets.values())
        if not groups and not self._buckets:
            groups.append([])  # no parameter is trained yet; the flag for unbucketed gradients needs a bucket anyway
        for group in groups:
            members = [self._parameters[index] for index in group]
            bucket = GradientBucket(group, members, self._parameters[0], self._dtype)
            self._buckets.append(bucket)
            for index in group:
                self._bucket_of[index] = bucket
        inside = {*self._sparse, *(i for i, bucket in enumerate(self._bucket_of) if bucket is not None)}
        self._unbucketed = [index for index in range(len(self._parameters)) if index not in inside]


def average_sparse(gradient: Tensor | None, parameter: Tensor, group: ProcessGroup) -> Tensor | None:
    """Averages gradients that are sparse in their first dim over all ranks; collective.

    The gradient is sparse or dense, of shape (rows, ...), or None, which counts as zeros.

    Returns:
        A coalesced sparse tensor of the parameter's shape, the same on all ranks; None if no rank has a gradient.
    """
    size = group.size()
    rows = None if gradient is None else _rows(gradient)
    num_rows = torch.tensor([-1 if rows is None else rows._nnz()], device=parameter.device)
    all_num_rows = [torch.empty_like(num_rows) for _ in range(size)]
    dist.all_gather(all_num_rows, num_rows, group=group)
    counts = [int(count) for count in torch.cat(all_num_rows).tolist()]
    if max(counts) < 0:
        return None

    # Messages of one collective have one length; the rows after a rank's count are padding.
    indices = torch.zeros(max(counts), dtype=torch.int64, device=parameter.device)
    values = parameter.new_zeros(max(counts), *parameter.shape[1:], dtype=gradient_dtype(parameter))
    if rows is not None:
        indices[: rows._nnz()] = rows.indices()[0]
        values[: rows._nnz()] = rows.values() / size
    all_indices = [torch.empty_like(indices) for _ in range(size)]
    all_values = [torch.empty_like(values) for _ in range(size)]
    dist.all_gather(all_indices, indices, group=group)
    dist.all_gather(all_values, values, group=group)
    unpadded = [slice(max(count, 0)) for count in counts]
    return torch.sparse_coo_tensor(
        torch.cat([padded[rows] for padded, rows in zip(all_indices, unpadded, strict=True)])[None],
        torch.cat([padded[rows] for padded, rows in zip(all_values, unpadded, strict=True)]),
        parameter.shape,
        check_invariants=False,
    ).coalesce()


def _rows(gradient: Tensor) -> Tensor:
    if gradient.is_sparse and gradient.sparse_dim() == 1:
        return gradient.coalesce()
    return gradient.to_dense().to_sparse(1)
