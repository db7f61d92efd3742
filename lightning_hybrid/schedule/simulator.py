"""Simulation of a schedule: the times of its actions, if every rank runs its row and waits where it must."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_hybrid.errors import ScheduleError
from lightning_hybrid.schedule.actions import Action, Kind, Portals, Schedule, needed_by


class Span(NamedTuple):
    """One action as it ran (or would run) on a rank; times in seconds."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The actions of all ranks with their times, simulated or measured; with gaps, and in any order."""

    spans: tuple[Span, ...]
    num_ranks: int

    @property
    def makespan_seconds(self) -> float:
        """The time from the first start to the last end over all ranks."""
        if not self.spans:
            return 0.0
        return max(span.end for span in self.spans) - min(span.start for span in self.spans)

    @property
    def busy_seconds(self) -> tuple[float, ...]:
        """For every rank, the time in which it did something; what overlaps counts once."""
        return tuple(
            _covered_seconds((span.start, span.end) for span in self.spans if span.rank == rank)
            for rank in range(self.num_ranks)
        )

    @property
    def bubble(self) -> float:
        """The idle share of rank-time, `1 - busy / (ranks * makespan)`; 0 for an empty timeline."""
        available = self.num_ranks * self.makespan_seconds
        return 1 - sum(self.busy_seconds) / available if available else 0.0


def simulate(
    schedule: Schedule,
    portals: Portals,
    *,
    forward_seconds: float | Sequence[float],
    backward_seconds: float | Sequence[float],
    transfer_seconds: float = 0.0,
    reduce_seconds: float | Sequence[float] = 0.0,
) -> Timeline:
    """Run a schedule under given costs.

    Sending costs the sender nothing; a message arrives `transfer_seconds` after the action that makes it, or at once
    on the same rank. I and W each take half of `backward_seconds`.

    Args:
        schedule: what each rank does.
        portals: which stages wait for which.
        forward_seconds: per microbatch; one number, or one per stage.
        backward_seconds: per microbatch; one number, or one per stage.
        transfer_seconds: per message between ranks.
        reduce_seconds: per REDUCE; one number, or one per stage.

    Returns:
        The timeline. Its spans stand in an order in which they could also run one by one: by start, and behind
        everything they depend on.

    Raises:
        ScheduleError: an action waits forever.
        ValueError: a list of costs is not one per stage.
    """
    forward = _per_stage("forward_seconds", forward_seconds, schedule.num_stages)
    backward = _per_stage("backward_seconds", backward_seconds, schedule.num_stages)
    reduce = _per_stage("reduce_seconds", reduce_seconds, schedule.num_stages)

    def seconds(action: Action) -> float:
        if action.kind is Kind.F:
            return forward[action.stage]
        if action.kind is Kind.REDUCE:
            return reduce[action.stage]
        return backward[action.stage] * (1 if action.kind is Kind.B else 0.5)

    return Timeline(tuple(_walk(schedule, portals, seconds, transfer_seconds)), schedule.num_ranks)


def without_waits(measured: Timeline, schedule: Schedule, portals: Portals) -> Timeline:
    """A measured timeline in which no action begins before all actions that it needs have ended.

    A forward may begin before what it needs has come, and waits inside: that is no work.
    """
    before = prerequisites(schedule, portals)
    ends = {span.action: span.end for span in measured.spans}

    def begun(span: Span) -> Span:
        start = max([span.start, *(ends[needed] for needed in before[span.action])])
        return span._replace(start=min(start, span.end))

    return Timeline(tuple(map(begun, measured.spans)), measured.num_ranks)


def without_losses(measured: Timeline, schedule: Schedule, portals: Portals) -> Timeline:
    """A measured timeline as it would be if no time had been lost between its actions.

    Each action takes as long as it took; the gaps that are left are the schedule's own. For a timeline `without_waits`
    it ends no later than what was measured.
    """
    seconds = {span.action: span.end - span.start for span in measured.spans}
    return Timeline(tuple(_walk(schedule, portals, seconds.__getitem__, 0.0)), schedule.num_ranks)


def replay(
    schedule: Schedule, portals: Portals, seconds: Mapping[Action, float], released: Sequence[float] = ()
) -> Timeline:
    """Run a schedule whose actions take given times, without any time for messages.

    Args:
        schedule: what each rank does.
        portals: as for `simulate`.
        seconds: of every action.
        released: by rank, when its first action may begin; 0 for all if empty.
    """
    return Timeline(tuple(_walk(schedule, portals, seconds.__getitem__, 0.0, released)), schedule.num_ranks)


def _walk(
    schedule: Schedule,
    portals: Portals,
    seconds: Callable[[Action], float],
    transfer_seconds: float,
    released: Sequence[float] = (),
) -> Iterator[Span]:
    before = prerequisites(schedule, portals)
    finished: dict[Action, tuple[int, float]] = {}  # action -> (rank, end)
    position = [0] * schedule.num_ranks
    free_at = list(released) or [0.0] * schedule.num_ranks
    ready_at: dict[int, float] = {}  # ranks whose next action only waits for its turn

    def start_of(rank: int) -> float | None:
        start = free_at[rank]
        for other in before[schedule.actions[rank][position[rank]]]:
            if other not in finished:
                return None
            other_rank, end = finished[other]
            start = max(start, end if other_rank == rank else end + transfer_seconds)
        return start

    waiting = {rank for rank in range(schedule.num_ranks) if schedule.actions[rank]}
    while waiting:
        for rank in sorted(waiting - ready_at.keys()):
            start = start_of(rank)
            if start is not None:
                ready_at[rank] = start
        if not ready_at:
            raise _stuck(schedule, before, finished, {rank: position[rank] for rank in sorted(waiting)})
        # The earliest start first: what it makes cannot be wanted by anything that started before it.
        start, rank = min((start, rank) for rank, start in ready_at.items())
        del ready_at[rank]
        action = schedule.actions[rank][position[rank]]
        free_at[rank] = start + seconds(action)
        finished[action] = (rank, free_at[rank])
        yield Span(rank, action, start, free_at[rank])
        position[rank] += 1
        if position[rank] == len(schedule.actions[rank]):
            waiting.remove(rank)


def prerequisites(schedule: Schedule, portals: Portals) -> dict[Action, list[Action]]:
    """For every action of a schedule, the actions that must end before it starts (the rank's own order aside)."""
    present = {action for row in schedule.actions for action in row}

    def maker(direction: str, stage: int, microbatch: int) -> Action:
        if direction == "forward":
            return Action(Kind.F, stage, microbatch)
        split = Action(Kind.I, stage, microbatch)
        return split if split in present else Action(Kind.B, stage, microbatch)

    before: dict[Action, list[Action]] = {}
    for action in present:
        needs = [maker(message.direction, message.source, message.microbatch) for message in needed_by(action, portals)]
        if action.kind in (Kind.B, Kind.I):
            needs.append(Action(Kind.F, action.stage, action.microbatch))
        elif action.kind is Kind.W:
            needs.append(Action(Kind.I, action.stage, action.microbatch))
        elif action.kind is Kind.REDUCE:
            ended = {a for row in schedule.actions if action in row for a in row if a.stage == action.stage}
            needs += sorted(a for a in ended if a.kind in (Kind.B, Kind.W))
        before[action] = needs
    return before


def _stuck(
    schedule: Schedule,
    before: dict[Action, list[Action]],
    finished: dict[Action, tuple[int, float]],
    positions: dict[int, int],
) -> ScheduleError:
    details = []
    for rank, position in positions.items():
        action = schedule.actions[rank][position]
        missing = ", ".join(str(other) for other in before[action] if other not in finished)
        details.append(f"rank {rank} waits at {action} for {missing}")
    return ScheduleError.at(
        f"schedule {schedule.name!r} cannot continue: every rank waits for another",
        schedule.actions,
        positions,
        details,
        entry="schedule-deadlock",
    )


def _per_stage(name: str, costs: float | Sequence[float], num_stages: int) -> list[float]:
    if isinstance(costs, (int, float)):
        return [float(costs)] * num_stages
    if len(costs) != num_stages:
        raise ValueError(f"{name} has {len(costs)} numbers for {num_stages} stages; give one number per stage")
    return [float(cost) for cost in costs]


def _covered_seconds(intervals: Iterator[tuple[float, float]]) -> float:
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered
