"""The measured actions and the memory of the ranks of a step, gathered on one clock, and their bubble."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter, time
from typing import Any, Literal

import torch.distributed as dist

from lightning_hybrid.layout import ParallelLayout
from lightning_hybrid.schedule import Kind, MemorySample, Portals, Span, Timeline
from lightning_hybrid.schedule.measured.lost_time import measured_schedule
from lightning_hybrid.schedule.simulator import without_losses, without_waits
from lightning_hybrid.soft_failures import only_informs

Ranks = Literal["first", "all"] | dict[str, int]

AXES = ("data", "context", "tensor", "pipeline")


@dataclass(frozen=True)
class MeasuredStep:
    """A step of the selected ranks, which are lanes numbered from 0."""

    timeline: Timeline  # the actions of the lanes
    memory: tuple[MemorySample, ...]  # the memory in use of the lanes; empty if it was not sampled
    # by heading ("rank", and the axes with several ranks), the number of each lane
    columns: Mapping[str, Sequence[int]]
    group_size: int  # lanes of one pipeline, which are neighbours
    portals: Portals | None = None  # which stages send messages to which; None without stages
    # the mean bubble of the pipelines, and the mean one by their schedule; None without full pipelines
    bubbles: tuple[float, float] | None = None
    # the longest pipeline, measured and by its schedule, without the optimizer's step; None as above
    seconds: tuple[float, float] | None = None
    # when each lane began to wait for its batch, and when it had it; None for lanes that did not record it
    inputs: tuple[tuple[float, float] | None, ...] = ()


def check_ranks(ranks: Any, layout: ParallelLayout | None = None) -> None:
    """Checks a selection of ranks, and whether a layout has them.

    Raises:
        ValueError: It selects no ranks.
    """
    sizes = None if layout is None else _sizes(layout)
    allowed = f"'first', 'all', or a mapping of {', '.join(map(repr, AXES))} to an index, such as {{'tensor': 0}}"
    if not isinstance(ranks, Mapping):
        if ranks not in ("first", "all"):
            raise ValueError(f"ranks={ranks!r} must be {allowed}")
        return
    for axis, index in ranks.items():
        if axis not in AXES or isinstance(index, bool) or not isinstance(index, int) or index < 0:
            raise ValueError(f"ranks={ranks!r} must be {allowed}")
        if sizes is not None and index >= sizes[axis]:
            raise ValueError(
                f"ranks={ranks!r} selects none: this run has {sizes[axis]} {axis} ranks; set {axis!r} to at most"
                f" {sizes[axis] - 1}"
            )


def select_ranks(layout: ParallelLayout, ranks: Ranks) -> list[int]:
    """Returns the selected global ranks, ranks of one pipeline beside each other."""
    fixed = ranks if isinstance(ranks, Mapping) else {}
    if ranks == "first":
        fixed = {"data": 0, "context": 0, "tensor": 0}
    places = {rank: _coordinates(layout, rank) for rank in range(layout.world_size)}
    chosen = [rank for rank, place in places.items() if all(place[axis] == index for axis, index in fixed.items())]
    return sorted(chosen, key=lambda rank: tuple(places[rank].values()))


def gather_step(strategy: Any, ranks: Ranks) -> MeasuredStep | None:
    """Gathers the latest step of the selected ranks on the first rank; None elsewhere. Collective over all ranks.

    Times are from the first action of any of these ranks. Actions of full pipelines begin when their inputs were there.
    """
    layout: ParallelLayout = strategy.layout
    group, chosen = strategy.mesh.group("world"), select_ranks(layout, ranks)
    offset, recorder = time() - perf_counter(), strategy.recorder
    is_chosen = strategy.global_rank in chosen
    local: Any = None
    if is_chosen:
        with only_informs("the record of a step"):
            local = (offset, recorder.spans(0), recorder.memory(0), recorder.input_wait())
    rows: list[Any] | None = [None] * group.size() if group.rank() == 0 else None
    dist.gather_object(local, rows, group=group, group_dst=0)
    return None if rows is None else _on_one_clock(strategy, ranks, chosen, rows)


@only_informs("the record of a step")
def _on_one_clock(strategy: Any, ranks: Ranks, chosen: Sequence[int], rows: Sequence[Any]) -> MeasuredStep | None:
    layout: ParallelLayout = strategy.layout
    if any(rows[rank] is None for rank in chosen):
        return None
    spans: list[Span] = []
    memory: list[MemorySample] = []
    inputs: list[tuple[float, float] | None] = []
    for lane, rank in enumerate(chosen):
        offset, own, sampled, waited = rows[rank]
        inputs.append(None if waited is None else (waited[0] + offset, waited[1] + offset))
        spans += [span._replace(rank=lane, start=span.start + offset, end=span.end + offset) for span in own]
        memory += [sample._replace(rank=lane, time=sample.time + offset) for sample in sampled]
    begin = min((span.start for span in spans), default=0.0)
    spans = [span._replace(start=span.start - begin, end=span.end - begin) for span in spans]
    memory = [sample._replace(time=max(0.0, sample.time - begin)) for sample in memory]
    inputs = [None if waited is None else (waited[0] - begin, waited[1] - begin) for waited in inputs]
    sizes = _sizes(layout)
    columns = {"rank": chosen} | {
        axis: [_coordinates(layout, rank)[axis] for rank in chosen] for axis in AXES if sizes[axis] > 1
    }
    is_whole = not (isinstance(ranks, Mapping) and "pipeline" in ranks)
    step = MeasuredStep(
        timeline=Timeline(tuple(spans), len(chosen)),
        memory=tuple(memory),
        columns=columns,
        group_size=layout.pipeline_parallel_size if is_whole else 1,
        inputs=tuple(inputs),
    )
    assignment = strategy.run.assignment
    has_all = all(any(span.rank == lane for span in spans) for lane in range(len(chosen)))
    return with_bubbles(step, assignment) if is_whole and has_all and assignment is not None else step


def with_bubbles(step: MeasuredStep, assignment: Any) -> MeasuredStep:
    """Returns a step of full pipelines without the times for which actions waited, with its bubbles."""
    size = step.group_size
    worked: list[Span] = []
    pairs: list[tuple[Timeline, Timeline]] = []
    for first in range(0, step.timeline.num_ranks, size):
        own = [span for span in step.timeline.spans if first <= span.rank < first + size]
        worked += [span for span in own if span.action.kind is Kind.OPTIMIZER]
        scheduled = [span._replace(rank=span.rank - first) for span in own if span.action.kind is not Kind.OPTIMIZER]
        pair = work_and_bound(Timeline(tuple(scheduled), size), assignment)
        worked += [span._replace(rank=span.rank + first) for span in pair[0].spans]
        pairs.append(pair)
    longest = [max(pair[index].makespan_seconds for pair in pairs) for index in (0, 1)]
    means = [sum(pair[index].bubble for pair in pairs) / len(pairs) for index in (0, 1)]
    return replace(
        step,
        timeline=Timeline(tuple(worked), step.timeline.num_ranks),
        portals=Portals.of(assignment),
        bubbles=(means[0], means[1]),
        seconds=(longest[0], longest[1]),
    )


def work_and_bound(timeline: Timeline, assignment: Any) -> tuple[Timeline, Timeline]:
    """Returns the measured actions of one pipeline without waiting times, and the same as if run without gaps."""
    schedule = measured_schedule(timeline, assignment.num_stages)
    assert schedule is not None  # each action of a pipeline runs once
    portals = Portals.of(assignment)
    worked = without_waits(timeline, schedule, portals)
    return worked, without_losses(worked, schedule, portals)


def _sizes(layout: ParallelLayout) -> dict[str, int]:
    return {axis: index + 1 for axis, index in _coordinates(layout, layout.world_size - 1).items()}


def _coordinates(layout: ParallelLayout, rank: int) -> dict[str, int]:
    place = layout.coordinates(rank)
    return {"data": layout.data_rank(rank), "context": place.cp, "tensor": place.tp, "pipeline": place.pp}
