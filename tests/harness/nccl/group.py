"""Process groups over gloo that record what NCCL would be asked, and complete as late as NCCL may.

* Outputs are poisoned until the stream that reads them has waited: NaN, or the largest integer.
* Inputs are sent as they are at the launch; that they have not changed by the wait is checked then.
* A work that is dropped without a wait leaves its outputs poisoned.
* `is_completed` says no until the host has waited for the stream that waited; with ``early``, yes at once.
* Only dtypes that NCCL supports are taken, only contiguous memory, and nothing on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness.gloo_via_host.copies import below_modes
from harness.nccl.lines import place
from harness.nccl.trace import Launch, Violation, Wait
from harness.python_group import PATIENCE, PythonGroup, check_sendable, define_operations, tensors_in

# By operation: its kind, and which arguments it reads and writes.
_OPERATIONS: dict[str, tuple[str, int, int]] = {
    "allreduce": ("allreduce", 0, 0),
    "broadcast": ("broadcast", 0, 0),
    "reduce": ("reduce", 0, 0),
    **dict.fromkeys(("allgather", "_allgather_base", "all_gather_single"), ("allgather", 1, 0)),
    **dict.fromkeys(("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single"), ("reduce_scatter", 1, 0)),
    **dict.fromkeys(("alltoall", "alltoall_base", "all_to_all_single"), ("alltoall", 1, 0)),
    "gather": ("gather", 1, 0),
    "scatter": ("scatter", 1, 0),
}


class Moved:
    """An argument, what was sent of it, and where its result arrives."""

    def __init__(self, value: Tensor, copied: Tensor, *, reads: bool, writes: bool) -> None:
        self._value, self._copied, self.writes = value, copied, writes
        self._before = copied.clone() if reads and not writes else None

    def poison(self) -> None:
        if self.writes:
            _poison(self._value.data)

    def deliver(self) -> None:
        if self.writes:
            self._value.data.copy_(self._copied)

    @property
    def has_changed(self) -> bool:
        """Whether an input is not what was sent."""
        return self._before is not None and not torch.equal(_bits(self._value), _bits(self._before))


class Operation:
    """One that gloo runs, and the device is not known to have done."""

    def __init__(self, group: RecordedGroup, launch: Launch, inner: Any, moved: Sequence[Moved]) -> None:
        self.launch, self.inner, self._moved = launch, inner, list(moved)
        self.recorder, self.is_host = group.recorder, group.is_host
        self._queue = group.under_way.setdefault(launch.comm, [])
        self.is_dropped = False
        self._queue.append(self)

    def end(self) -> None:
        """End those before it on its communicator, and itself; those of gloo have no order."""
        ended = [self] if self.is_host else self._queue[: self._queue.index(self) + 1] if self in self._queue else []
        for each in ended:
            if each in self._queue:
                self._queue.remove(each)
                each._deliver()

    def _deliver(self) -> None:
        self.inner.wait(PATIENCE)
        with below_modes():
            for moved in self._moved:
                if moved.has_changed:
                    self.report("input changed", "an input changes before the operation is over")
                elif not self.is_dropped:
                    moved.deliver()
        self._moved.clear()

    def report(self, rule: str, text: str) -> None:
        self.recorder.add(Violation(rule, f"{self.launch.kind}: {text}", self.launch.line))


class RecordedWork(torch._C._distributed_c10d.Work):
    """What a caller has of an operation."""

    def __init__(self, operation: Operation) -> None:
        super().__init__()
        self._operation, self._waited_at = operation, -1

    def wait(self, timeout: timedelta = PATIENCE) -> bool:
        """Let the current stream wait, and for NCCL's barrier the host too."""
        operation = self._operation
        recorder = operation.recorder
        recorder.add(Wait(operation.launch.number, place().line, recorder.thread))
        operation.end()
        self._waited_at = recorder.num_syncs
        if operation.launch.kind == "barrier" and not operation.is_host:
            recorder.marks.read("barrier")
        return True

    def is_completed(self) -> bool:
        """Whether the device is known to be done."""
        recorder, inner = self._operation.recorder, self._operation.inner
        if recorder.early:  # as on a fast device, whose peers are never behind; gloo may do it in the wait alone
            return bool(inner.wait(PATIENCE))
        if self._operation.is_host:
            return bool(inner.is_completed())
        return 0 <= self._waited_at < recorder.num_syncs

    def __del__(self) -> None:
        if self._waited_at < 0 and self._operation.recorder.is_open:
            self._operation.is_dropped = True
            self._operation.report("dropped", "its work is dropped without a wait")


class RecordedGroup(PythonGroup):
    """One group of the device, or of gloo."""

    def __init__(self, recorder: Any, store: Any, rank: int, size: int, *, is_host: bool) -> None:
        super().__init__("recorded", store, rank, size, PATIENCE)
        self.recorder, self.is_host = recorder, is_host
        self._num_transfers: dict[tuple[int, bool], int] = {}
        self.under_way: dict[str, list[Operation]] = {}

    # -- operations ----------------------------------------------------------------------------------------------------

    def _collective(self, name: str, *args: Any, **kwargs: Any) -> RecordedWork:
        kind, reads, writes = _OPERATIONS[name]
        options = [*args, *kwargs.values()]
        root = int(next((each.rootRank for each in options if hasattr(each, "rootRank")), -1))
        moved, copied = [], []
        for position, value in enumerate(args):
            does_read = position == reads and not (kind == "broadcast" and root != self.rank())
            does_write = position == writes and not (kind == "broadcast" and root == self.rank())
            does_write &= not (kind == "reduce" and root != self.rank())
            copied.append(self._copies(value, moved, reads=does_read, writes=does_write))
        sizes = _sizes_of(kind, args, self.size())
        return self._begin(kind, root, sizes, None, args, moved, getattr(self._inner, name), copied, kwargs)

    def barrier(self, opts: Any = None) -> RecordedWork:
        return self._begin("barrier", -1, (1,), None, (), [], self._inner.barrier, [dist.BarrierOptions()], {})

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> RecordedWork:
        return self._transfer(tensors, peer, "send")

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> RecordedWork:
        return self._transfer(tensors, peer, "recv")

    def _transfer(self, tensors: list[Tensor], peer: int, kind: str) -> RecordedWork:
        sends = kind == "send"
        number = self._num_transfers[peer, sends] = self._num_transfers.get((peer, sends), 0) + 1
        moved: list[Moved] = []
        copied = self._copies(tensors, moved, reads=sends, writes=not sends)
        run = self._inner.send if sends else self._inner.recv
        return self._begin(kind, -1, (tensors[0].numel(),), peer, tensors, moved, run, [copied, peer, number], {})

    def _copies(self, value: Any, moved: list[Moved], *, reads: bool, writes: bool) -> Any:
        if isinstance(value, Tensor):
            self._check(value)
            with below_modes(), torch.inference_mode(False):
                copied = value.detach().clone()
                copied = copied.view(torch.uint8) if copied.dtype is torch.bool else copied
                moved.append(Moved(value, copied, reads=reads, writes=writes))
            return copied
        if isinstance(value, list | tuple):
            return type(value)([self._copies(each, moved, reads=reads, writes=writes) for each in value])
        return value

    def _check(self, tensor: Tensor) -> None:
        if self.is_host:
            return
        check_sendable(tensor)
        if self.recorder.marks.is_on_host(tensor):
            text = f"NCCL is given one of shape {tuple(tensor.shape)}"
            self.recorder.add(Violation("host tensor", text, place().line))

    def _begin(
        self,
        kind: str,
        root: int,
        sizes: tuple[int, ...],
        peer: int | None,
        given: Any,
        moved: list[Moved],
        run: Any,
        args: list[Any],
        kwargs: dict[str, Any],
    ) -> RecordedWork:
        ranks = dist.get_process_group_ranks(self)
        members = tuple(ranks if peer is None else sorted((ranks[self.rank()], ranks[peer])))
        comm = f"{self.group_name}:{','.join(map(str, members))}{' pair' * (peer is not None)}"
        tensors = list(tensors_in(given))
        launch = Launch(
            number=self.recorder.next_number(),
            comm=comm,
            members=members,
            kind=kind,
            dtype=str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
            sizes=sizes,
            root=root,
            nbytes=sum(tensor.nbytes for tensor in tensors),
            is_host=self.is_host,
            line=place().line,
            thread=self.recorder.thread,
        )
        self.recorder.add(launch)
        with below_modes(), torch.inference_mode(False):
            if not self.is_host:
                for each in moved:
                    each.poison()
            inner = run(*args, **kwargs)
        return RecordedWork(Operation(self, launch, inner, moved))


define_operations(RecordedGroup, _OPERATIONS)


def _sizes_of(kind: str, args: Sequence[Any], size: int) -> tuple[int, ...]:
    """Elements of this rank's own tensor; of an exchange, of those to each member and of those from each."""
    if kind != "alltoall":
        return (sum(tensor.numel() for tensor in tensors_in(args[kind in ("allgather", "gather")])),)
    out, sent = args[:2]
    if isinstance(out, list):
        return tuple(tensor.numel() for tensor in (*sent, *out))
    return (*_parts(sent, args[3], size), *_parts(out, args[2], size))


def _parts(tensor: Tensor, lengths: Sequence[int], size: int) -> list[int]:
    """Elements of the part of each member; even parts where no lengths are given."""
    width = tensor.numel() // max(1, tensor.shape[0])
    return [length * width for length in lengths] or [tensor.numel() // size] * size


def _poison(tensor: Tensor) -> None:
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif tensor.dtype is not torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


def _bits(tensor: Tensor) -> Tensor:
    """NaN equals itself."""
    return tensor.detach().contiguous().view(torch.uint8) if tensor.dim() else tensor.detach().view(1).view(torch.uint8)
