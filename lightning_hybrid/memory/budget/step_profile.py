"""What happened in training batches whose layers kept nothing: when layers ran, what they saved, how much was alive.

A batch is cut into intervals by the events of its layers. Each has the peak of the bytes alive in it, and for each run
of a layer its place between its forward and the end of its backward; so microbatches in flight, gradients, messages and
gathered parameters are in the numbers, under any schedule.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from lightning_hybrid.memory.budget.layer_structure import LayerStructure
from lightning_hybrid.memory.budget.live_bytes import LiveBytes
from lightning_hybrid.memory.budget.resident_bytes import Event

Kind = Literal["enter", "leave", "restore", "restored", "release", "optimizer"]


@dataclass(eq=False)
class LayerRun:
    """One run of a layer.

    Attributes:
        fqn: Of the layer.
        input_bytes: Of the tensors that it was called with.
        structure: None until its forward has ended, and for compiled layers.
        saved_bytes: That autograd saves in a compiled layer; None until it was recomputed.
        bytes_before: That were alive before its forward.
        forward_bytes: The peak of its forward if nothing that it saves is released, above what was alive before.
        work: Of the forward of a compiled layer, in floating-point operations.
        events: Of its backward so far.
    """

    fqn: str
    input_bytes: int
    structure: LayerStructure | None = None
    events: list[Event] = field(default_factory=list)
    saved_bytes: int | None = None
    bytes_before: int = 0
    forward_bytes: int = 0
    work: float = 0.0
    _saves: dict[int, weakref.ref[Any]] = field(default_factory=dict)


class Interval(NamedTuple):
    """The time after one event until the next one.

    Attributes:
        kind: Of the event that begins it.
        run: The layer's run that the event belongs to; None at the beginning, and for "optimizer".
        position: The number of events of the backward of this run, those before it and it included.
        peak: The most bytes that were alive in it.
    """

    kind: Kind | None
    run: LayerRun | None
    position: int
    peak: int


class SavedInRun:
    """What autograd keeps in place of a tensor that a profiled layer saves."""

    __slots__ = ("__weakref__", "content", "number")

    def __init__(self, content: Any, number: int) -> None:
        self.content, self.number = content, number


class StepProfile:
    """Records training batches.

    Attributes:
        live: The mode under which they run.
        intervals: In order, without the one that lasts.
    """

    def __init__(self, device: torch.device) -> None:
        """Record tensors of the type of ``device``."""
        self.live = LiveBytes(device)
        self.intervals: list[Interval] = []
        self._last: tuple[Kind | None, LayerRun | None, int] = None, None, 0
        self._is_closed = False

    def enter(self, fqn: str, input_bytes: int) -> LayerRun:
        """Begin the forward of a layer."""
        run = LayerRun(fqn, input_bytes)
        self._mark("enter", run)
        return run

    def leave(self, run: LayerRun) -> None:
        """End the forward of a layer."""
        self._mark("leave", run)

    def saved(self, run: LayerRun, content: Any, number: int) -> SavedInRun:
        """Return what autograd keeps in place of a tensor, the one with this number in the run."""
        saved = SavedInRun(content, number)
        run._saves[number] = weakref.ref(saved, lambda _: self._backward_event(run, "release", number))
        return saved

    def begin_restore(self, run: LayerRun, saved: SavedInRun) -> None:
        """Begin to restore a saved tensor."""
        self._backward_event(run, "restore", saved.number)

    def end_restore(self, run: LayerRun, saved: SavedInRun) -> None:
        """End what `begin_restore` began."""
        self._backward_event(run, "restored", saved.number)

    def begin_recomputation(self, run: LayerRun) -> None:
        """Begin to repeat the forward of a layer, as its backward begins."""
        self._mark("restore", run)

    def end_recomputation(self, run: LayerRun) -> None:
        """End what `begin_recomputation` began."""
        self._mark("restored", run)

    def begin_optimizer_step(self) -> None:
        """Begin what comes after the backwards."""
        self._mark("optimizer", None)

    def close(self) -> None:
        """End the last interval, and record nothing more."""
        self._mark(None, None)
        self._is_closed = True

    @property
    def runs(self) -> Iterator[LayerRun]:
        """The runs of layers, in order."""
        return (interval.run for interval in self.intervals if interval.kind == "enter" and interval.run is not None)

    @property
    def peak(self) -> Interval:
        """The interval with the most bytes."""
        return max(self.intervals, key=lambda interval: interval.peak)

    def _backward_event(self, run: LayerRun, kind: Literal["restore", "restored", "release"], number: int) -> None:
        if not self._is_closed:
            run.events.append(Event(kind, number))
            self._mark(kind, run)

    def _mark(self, kind: Kind | None, run: LayerRun | None) -> None:
        """End an interval and begin the next one."""
        if self._is_closed:
            return
        last, last_run, position = self._last
        self.intervals.append(Interval(last, last_run, position, self.live.begin_interval()))
        self._last = kind, run, 0 if run is None else len(run.events)
