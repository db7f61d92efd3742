"""Seconds that pipeline ranks wait for each other: of equal stages in closed form, of others by simulation."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lightning_hybrid.schedule.actions import Kind, chain
from lightning_hybrid.schedule.generators import make_schedule
from lightning_hybrid.schedule.simulator import prerequisites, replay

_MOST_RANKS, _MOST_ROUNDS = 8, 3  # of a simulation; a round is one microbatch for each rank
_EQUAL = 1e-6  # relative difference of stages that count as equal
_PROGRAMS_OF_EQUAL_STAGES = ("zero_bubble_v", "dualpipe_v", "zero_bubble_searched")
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
    """The actions of a schedule in an order in which each stands behind all that it waits for."""

    costs: tuple[int, ...]  # for each action, its place in a list of the times of all parts of all stages
    before: tuple[tuple[int, ...], ...]  # for each action, the actions that it waits for, that of its rank included


def program_seconds(
    name: str, num_ranks: int, num_microbatches: int, stages: Sequence[StageSeconds], widths: tuple[int, ...] = ()
) -> float:
    """Return the time from the first start to the last end over all ranks; stages are in order, messages at no cost."""
    program = _program(name, num_ranks, num_microbatches, 1 if widths else len(stages) // num_ranks, widths)
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
def _program(
    name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int, widths: tuple[int, ...] = ()
) -> _Program:
    schedule = make_schedule(name, num_ranks, num_microbatches, stages_per_rank, widths=widths)
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


def bubble_seconds(schedule: str, num_microbatches: int, ranks: Sequence[Mapping[int, StageSeconds]]) -> float:
    """Return the time that the rank with most work waits in one step.

    Stages of equal times: under a schedule that does not split backwards it waits once for all the others (Narayanan
    et al., arXiv 2104.04473, section 2.2), divided by the stages of a rank; under ZB-H1 for what the gradients of
    weights do not fill, ``F + I - W`` of ``F + I + W`` (Qi et al., arXiv 2401.10241, table 2). Otherwise the program of
    the schedule is simulated; of many ranks, 8 with the slowest among them, and of many microbatches the first few
    rounds, after which each further round takes as long as the last one.
    """
    busy = [sum(stage.total for stage in stages.values()) for stages in ranks]
    others = sum(busy) - max(busy)
    if len(ranks) == 1 or not others:
        return 0.0
    share = _share_of_equal_stages(schedule, num_microbatches, ranks)
    if share is not None:
        return share * others / len(ranks[0])
    chosen = _chosen_ranks(busy)
    few = [ranks[rank] for rank in chosen]
    stages = [stage for _, stage in sorted(itertools.chain(*(each.items() for each in few)))]
    scaled = max(1, round(num_microbatches * len(few) / len(ranks)))
    first = scaled
    if scaled > (_MOST_ROUNDS + 1) * len(few):
        first = _MOST_ROUNDS * len(few) + scaled % len(few)
    step = program_seconds(schedule, len(few), first, stages)
    each = max(busy)
    if first < scaled:
        round_before = program_seconds(schedule, len(few), first - len(few), stages)
        each = max(each, (step - round_before) / len(few))
    waited = max(0.0, step - first * each) * others / (sum(busy[rank] for rank in chosen) - max(busy))
    return waited + num_microbatches * (each - max(busy))


def seconds_of_widths(
    schedule: str, num_microbatches: int, stages: Sequence[StageSeconds], widths: tuple[int, ...]
) -> float:
    """Return the time of the program of stages that several ranks hold.

    Of many microbatches the first few rounds are simulated; each further one takes what the slowest stage takes, by the
    number of its ranks.
    """
    first = min(num_microbatches, 2 * (_MOST_ROUNDS + 1) * len(stages) * max(widths))
    slowest = max(stage.total / width for stage, width in zip(stages, widths, strict=True))
    step = program_seconds(schedule, sum(widths), first, stages, widths)
    return step + (num_microbatches - first) * slowest


def _share_of_equal_stages(
    schedule: str, num_microbatches: int, ranks: Sequence[Mapping[int, StageSeconds]]
) -> float | None:
    """Share of a stage of each other rank that is waited for, or None where a simulation has to tell."""
    one, *rest = itertools.chain(*(stages.values() for stages in ranks))
    least = _EQUAL * one.total
    if any(abs(a - b) > least for stage in rest for a, b in zip(one, stage, strict=True)):
        return None
    p, m, v = len(ranks), num_microbatches, len(ranks[0])
    if schedule in _PROGRAMS_OF_EQUAL_STAGES:
        return None
    if m < p:  # each microbatch goes round alone
        return (v * (p - m) + m - 1) / (p - 1) if schedule in ("1f1b", "interleaved_1f1b") else None
    return 1.0 - 2.0 * one.weights / one.total if schedule == "zero_bubble" else 1.0


def _chosen_ranks(busy: Sequence[float]) -> list[int]:
    """The ranks of a simulation: the first, the last, the slowest, and others at equal distances."""
    count = len(busy)
    if count <= _MOST_RANKS:
        return list(range(count))
    chosen = [round(place * (count - 1) / (_MOST_RANKS - 1)) for place in range(_MOST_RANKS)]
    slowest = max(range(count), key=busy.__getitem__)
    if slowest not in chosen:
        nearest = min(range(1, _MOST_RANKS - 1), key=lambda place: abs(chosen[place] - slowest))
        chosen[nearest] = slowest
    return sorted(chosen)
