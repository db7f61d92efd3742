"""What happened in training batches whose layers were recomputed in full: when they ran, and how much was alive.

Bytes are those of ``LiveBytes``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_hybrid.memory.live import LiveBytes
from lightning_hybrid.memory.recompute.selective import NO_COSTS, KeptResult, MeasuredRun, plain_tensors

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
