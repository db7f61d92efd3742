"""Seconds of a schedule's program whose stages take given times: `program_seconds`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from lightning_hybrid.schedule.actions import Kind, chain
from lightning_hybrid.schedule.generators import make_schedule
from lightning_hybrid.schedule.simulator import prerequisites, replay

_PARTS = {Kind.F: 0, Kind.I: 1, Kind.W: 2, Kind.B: 3, Kind.REDUCE: 4}


class StageSeconds(NamedTuple):
    """Seconds of one microbatch on one stage, communication with other stages aside.

    Attributes:
        forward: Of its forward.
        inputs: Of the gradients of its inputs, what it recomputes included.
        weights: Of the gradients of its weights.
    """

    forward: float
    inputs: float
    weights: float

    @property
    def total(self) -> float:
        """Seconds of forward and backward."""
        return self.forward + self.inputs + self.weights


class _Program(NamedTuple):
    """The actions of a schedule in an order in which each stands behind all that it waits for.

    Attributes:
        costs: For each action, its place in a list of the times of all parts of all stages.
        before: For each action, the actions that it waits for, that of its rank included.
    """

    costs: tuple[int, ...]
    before: tuple[tuple[int, ...], ...]


def program_seconds(name: str, num_ranks: int, num_microbatches: int, stages: Sequence[StageSeconds]) -> float:
    """Return the time from the first start to the last end over all ranks, messages at no cost.

    Args:
        name: Of the schedule.
        num_ranks: Pipeline ranks.
        num_microbatches: Microbatches of one step and replica.
        stages: Of the pipeline, in order of execution; as many for each rank.
    """
    program = _program(name, num_ranks, num_microbatches, len(stages) // num_ranks)
    seconds = [part for each in stages for part in (*each, each.inputs + each.weights, 0.0)]
    ends: list[float] = []
    for cost, before in zip(program.costs, program.before, strict=True):
        start = 0.0
        for other in before:
            if ends[other] > start:
                start = ends[other]
        ends.append(start + seconds[cost])
    return max(ends)


@functools.lru_cache(maxsize=256)
def _program(name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> _Program:
    schedule = make_schedule(name, num_ranks, num_microbatches, stages_per_rank)
    portals = chain(schedule.num_stages)
    waited_for = prerequisites(schedule, portals)
    for row in schedule.actions:
        for earlier, later in itertools.pairwise(row):
            waited_for[later].append(earlier)
    spans = replay(schedule, portals, dict.fromkeys(waited_for, 1.0)).spans
    places = {span.action: place for place, span in enumerate(spans)}
    costs = [5 * span.action.stage + _PARTS[span.action.kind] for span in spans]
    before = [tuple(places[other] for other in waited_for[span.action]) for span in spans]
    return _Program(tuple(costs), tuple(before))
