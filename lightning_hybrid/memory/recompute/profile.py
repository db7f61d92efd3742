"""What happened in training batches whose layers were recomputed in full: when they ran, and how much was alive.

Bytes are counted on tensors, as operations make and release storages, not read from an allocator, so that they are the
same on every device. What is not seen: the workspace of kernels, memory of other libraries, and tensors that existed
before and are not passed to `track`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_hybrid.memory.recompute.selective import NO_COSTS, KeptResult, MeasuredRun, plain_tensors
from lightning_hybrid.step.objects.tensors import storage_id


class LiveBytes(TorchDispatchMode):
    """Counts the storages that are made inside, or passed to it.

    Attributes:
        now: Bytes that are alive.
        peak: The most since `begin_interval`.
    """

    def __init__(self, device: torch.device) -> None:
        """Count storages of the type of ``device``."""
        super().__init__()
        self._device_type = device.type
        self._storages: dict[int, _Counted] = {}
        self.now = self.peak = 0

    def track(self, tensors: Iterable[Tensor]) -> None:
        """Count the storages of tensors of any shape that exist already."""
        with torch._C.DisableTorchFunction():  # a hook would gather them
            for tensor in tensors:
                self._add(tensor)

    def add_constant(self, nbytes: int) -> None:
        """Count bytes that stay."""
        self.now += nbytes
        self.peak = max(self.peak, self.now)

    def begin_interval(self) -> int:
        """Return the peak since the last call, and begin with the bytes that are alive now."""
        peak, self.peak = self.peak, self.now
        return peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self._add(out)
        elif isinstance(out, tuple | list):
            for each in pytree.tree_leaves(out):
                if isinstance(each, Tensor):
                    self._add(each)
        return out

    def _add(self, tensor: Tensor) -> None:
        if tensor.layout is not torch.strided or type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            return
        storage = tensor.untyped_storage()
        if storage.device.type != self._device_type:
            return
        address, nbytes = storage_id(tensor), storage.nbytes()
        counted = self._storages.get(address)
        if counted is None:
            counted = self._storages[address] = _Counted()
            counted.reference = weakref.ref(storage, lambda _: self._remove(address, counted))
        self.now += nbytes - counted.nbytes  # a storage may be resized
        counted.nbytes = nbytes
        self.peak = max(self.peak, self.now)

    def _remove(self, address: int, counted: _Counted) -> None:
        self.now -= counted.nbytes
        if self._storages.get(address) is counted:
            del self._storages[address]


class _Counted:
    """A storage, and the bytes of it that are counted."""

    __slots__ = ("nbytes", "reference")

    def __init__(self) -> None:
        self.nbytes = 0
        self.reference: Any = None


Kind = Literal["enter", "leave", "restore", "restored", "optimizer"]


class ProfiledRun(MeasuredRun):
    """One run of a layer that is recomputed in full.

    Attributes:
        fqn: Of the layer.
        measured: Its costs, once its forward has ended.
        bytes_before: That were alive before its forward.
        forward_bytes: The peak of its forward if nothing that it saves is released, above what was alive before.
    """

    def __init__(self, profile: StepProfile, fqn: str, inputs: Iterable[Tensor]) -> None:
        super().__init__(inputs)
        self.fqn, self._profile = fqn, profile
        self.measured, self._has_returned = NO_COSTS, False
        self.bytes_before, self.forward_bytes = profile.live.now, 0
        profile.mark("enter", self)

    def returned(self, out: Any) -> None:
        """Ends the forward."""
        self.measured, self._has_returned = self.costs(plain_tensors(out)), True
        self._profile.mark("leave", self)

    def begin_repetition(self) -> dict[int, KeptResult]:
        """Begins to repeat the forward, as the backward begins."""
        if self._has_returned:
            self._profile.mark("restore", self)
        self._bytes = self._profile.live.now
        return super().begin_repetition()

    def end_repetition(self) -> None:
        """Ends what `begin_repetition` began."""
        super().end_repetition()
        if self._has_returned:
            self.forward_bytes = self._profile.live.peak - self._bytes
            self._profile.mark("restored", self)


class Interval(NamedTuple):
    """The time after one event until the next one."""

    kind: Kind | None  # of the event that begins it
    run: ProfiledRun | None  # the layer's run that the event belongs to; None at the beginning, and for "optimizer"
    peak: int  # the most bytes that were alive in it


class StepProfile:
    """Records training batches: a batch is cut into intervals by the events of its layers, each with its peak.

    So microbatches in flight, gradients, messages and gathered parameters are in the numbers, under any schedule.

    Attributes:
        live: The mode under which they run.
        intervals: In order, without the one that lasts.
    """

    def __init__(self, device: torch.device) -> None:
        """Records tensors of the type of ``device``."""
        self.live = LiveBytes(device)
        self.intervals: list[Interval] = []
        self._last: tuple[Kind | None, ProfiledRun | None] = None, None
        self._is_closed = False

    def mark(self, kind: Kind | None, run: ProfiledRun | None = None) -> None:
        """Ends an interval and begins the next one."""
        if not self._is_closed:
            self.intervals.append(Interval(*self._last, self.live.begin_interval()))
            self._last = kind, run

    def close(self) -> None:
        """Ends the last interval, and records nothing more."""
        self.mark(None)
        self._is_closed = True

    @property
    def runs(self) -> list[ProfiledRun]:
        """The runs of layers, in order."""
        return [run for kind, run, _ in self.intervals if kind == "leave" and run is not None]

    @property
    def highest(self) -> Interval:
        """The interval with the most bytes."""
        return max(self.intervals, key=lambda interval: interval.peak)
