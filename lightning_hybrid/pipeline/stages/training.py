"""What is done around a step, its layers and its backwards, and when this rank ran each of its actions.

On a CUDA device the times are those of the device: an event is recorded on the current stream at the start and the end
of each action, and read after the step, when it is placed on the clock of the host; only for steps with a reader.
Elsewhere they are those of the host.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.schedule import Action, MemorySample, Span

Mark = Any  # seconds of `time.perf_counter`, or a CUDA event

_CPU = torch.device("cpu")
_STATM = Path("/proc/self/statm")


class StepUndone(Exception):
    """A training step has learned from its run how it must run, and its effects are undone: it runs again."""


class ActionRecorder:
    """Records the actions of the latest training step.

    Attributes:
        time_readers: Objects for which events are recorded on a CUDA device, from the next step on; the host's clock is
            read in any case.
        memory_readers: Objects for which the memory in use is read at the start and the end of each action; it is not
            read while there are none. They read the times too.
    """

    def __init__(self, device: torch.device = _CPU, new_event: Callable[[], Any] | None = None) -> None:
        """Set up for a rank on ``device``; ``new_event`` returns a CUDA event with timing, and serves tests."""
        self.time_readers: set[object] = set()
        self.memory_readers: set[object] = set()
        self._device, self._is_cuda = device, device.type == "cuda"
        self._new_event = new_event or _new_cuda_event
        self._rows: list[tuple[Action, Mark, Mark, float]] = []
        self._memory: list[tuple[Mark, int]] = []
        self._last: Mark = None
        self._input: list[Mark] = []
        self._is_recording = not self._is_cuda

    def begin_input(self) -> None:
        """Record that this rank waits for its batch from now on; on a CUDA device, from the end of launched work."""
        self._input = [self._now()] if self._is_read else []

    def end_input(self) -> None:
        """Record that the batch of the next step has come."""
        if len(self._input) == 1:
            self._input.append(self._now())

    def begin(self) -> None:
        """Forget the earlier step."""
        self._rows, self._memory = [], []
        self._is_recording = self._is_read
        self._last = self.mark()

    def mark(self) -> Mark:
        """The present time, on a CUDA device an event after all launched work; None in a step that is not recorded."""
        if not self._is_recording:
            return None
        mark = self._now()
        if self.memory_readers:
            self._memory.append((mark, used_bytes(self._device)))
        return mark

    def add(self, action: Action, start: Mark, waited_seconds: float = 0.0) -> None:
        """Record an action that began at ``start`` and ends now, without the time for which the host waited in it."""
        if not self._is_recording:
            return
        self._last = self.mark()
        self._rows.append((action, start, self._last, waited_seconds))

    def add_since_last(self, action: Action) -> None:
        """Record an action that began when the last one ended, or at the beginning of the step."""
        self.add(action, self._last if self._last is not None else self.mark())

    def spans(self, rank: int) -> list[Span]:
        """The actions with their times in seconds of ``time.perf_counter``; waits for a CUDA device."""
        seconds = self._seconds()
        return [
            Span(rank, action, seconds(start) + (0.0 if self._is_cuda else waited), seconds(end))
            for action, start, end, waited in self._rows
        ]

    def memory(self, rank: int) -> list[MemorySample]:
        """The memory in use between the actions; empty if it was not sampled."""
        seconds = self._seconds()
        return [MemorySample(rank, seconds(mark), size) for mark, size in self._memory]

    def input_wait(self) -> tuple[float, float] | None:
        """When this rank began to wait for its batch, and when it had it; None if that was not recorded."""
        if len(self._input) < 2:
            return None
        seconds = self._seconds()
        return seconds(self._input[0]), seconds(self._input[1])

    @property
    def _is_read(self) -> bool:
        """Whether times are recorded: always by the clock of the host, and for readers on a CUDA device."""
        return not self._is_cuda or bool(self.time_readers or self.memory_readers)

    def _now(self) -> Mark:
        if not self._is_cuda:
            return time.perf_counter()
        event = self._new_event()
        event.record()
        return event

    def _seconds(self) -> Callable[[Mark], float]:
        """A function that returns the host's time of a mark."""
        if not self._is_cuda or not (self._rows or self._memory or self._input):
            return lambda mark: mark
        now = self._new_event()
        now.record()
        now.synchronize()
        anchor = time.perf_counter()
        return lambda mark: anchor - mark.elapsed_time(now) / 1000  # milliseconds


def used_bytes(device: torch.device) -> int:
    """The memory in use: of tensors on a CUDA device, and of the whole process (resident set size) elsewhere."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not on Linux
        return 0


def _new_cuda_event() -> Any:
    return torch.cuda.Event(enable_timing=True)


class Backwards:
    """What a step does around its backwards. This one is of evaluation, and of manual optimization: there are none.

    Attributes:
        are_run: Whether the runner runs backwards.
        weighs: Whether the user weighs microbatches.
        seed_factor: Gradient of the loss from which a backward starts (loss scale / accumulated batches).
        recorder: Records when this rank's actions ran.
    """

    are_run = False
    weighs = False
    seed_factor = 1.0

    def __init__(self) -> None:
        self.recorder = ActionRecorder()

    def weights(self, parts: Sequence[Any]) -> list[float]:
        """The weights that the user gives the microbatches, where ``weighs``."""
        raise NotImplementedError

    def on_loss(self, loss: Tensor) -> None:
        """Called with the scalar loss of each microbatch before its backward, in steps without stages."""

    def before(self, stage: int, is_last: bool) -> None:
        """Called before each backward of a stage, with whether it is the last one of the stage."""

    def after(self, stage: int, is_last: bool) -> None:
        """Called after each backward, as ``before``."""

    def reduce(self, stage: int) -> None:
        """Called with a stage after its last backward."""
