"""Lost time of a measured step by cause: bubble, imbalance, variation, communication, input.

The actions of one pipeline are replayed under less and less ideal conditions, and each condition is charged with the
time that it adds to the step::

    work            the seconds of all forwards and backwards, shared equally by the ranks
    + bubble        the schedule, with stages of equal seconds
    + imbalance     each stage with its own mean seconds
    + variation     each action with its own seconds
    + other         gaps before actions that no message explains
    + communication gaps before or after messages, and the reduction of gradients
    + input         the ranks begin when their batch has come
    + optimizer     from the last action to the end of the step

The last sum is the measured step, from the time when the last rank had ended the step before. A rank's own row has what
it did or waited for itself: its messages, its reduction, its batch; what remains is waiting for other ranks, the
bubble's seconds first.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

from lightning_hybrid.schedule.actions import Action, Kind, Portals, Schedule, made_by
from lightning_hybrid.schedule.simulator import Span, Timeline, prerequisites, replay

# By cause, what the reader of a table can change.
LOSSES = ("bubble", "imbalance", "variation", "communication", "input", "other")


@dataclass(frozen=True)
class TimeByCause:
    """The seconds of a step, or of a rank in it, by cause; their sum is the step.

    Attributes:
        work: Forwards and backwards.
        bubble: The fill and drain of the schedule with equal stages.
        imbalance: Unequal stages; for a rank, all waiting for other ranks beyond the bubble.
        variation: Actions of one stage that take unequal times; 0 for a rank.
        communication: Messages between stages, and the reduction of gradients with its wait for other replicas.
        input: Waiting for the batch: loader, transfer hooks, the copy to the device.
        other: Gaps without a message: before the first action (callbacks, splits, dry runs, comparisons of
            microbatches), and between actions (Python).
        optimizer: From the last action to the end of the step: exchange of results, clipping, the optimizer's step.
    """

    work: float = 0.0
    bubble: float = 0.0
    imbalance: float = 0.0
    variation: float = 0.0
    communication: float = 0.0
    input: float = 0.0
    other: float = 0.0
    optimizer: float = 0.0

    @property
    def step_seconds(self) -> float:
        """The seconds of the step."""
        return sum(self.seconds().values())

    def seconds(self) -> dict[str, float]:
        """The seconds by cause."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True)
class LostTime:
    """The lost time of one step."""

    total: TimeByCause  # by how much each cause makes the step longer; the mean over pipelines
    ranks: tuple[TimeByCause, ...]  # for each lane what it did and waited for
    starts: tuple[float, ...] = ()  # for each lane the seconds of "other" before its first action


def measured_schedule(timeline: Timeline, num_stages: int) -> Schedule | None:
    """The order in which the ranks of one pipeline ran their actions, and where; None if one ran twice."""
    rows: list[list[Span]] = [[] for _ in range(timeline.num_ranks)]
    for span in sorted(timeline.spans, key=lambda span: span.start):
        rows[span.rank].append(span)
    actions = tuple(tuple(span.action for span in row) for row in rows)
    if len({action for row in actions for action in row}) < len(timeline.spans):
        return None
    first_has_last = any(action.stage == num_stages - 1 for action in actions[0])
    stages = [{action.stage for action in row} for row in actions]
    return Schedule(
        name="measured",
        num_ranks=timeline.num_ranks,
        stages_per_rank=max(1, num_stages // timeline.num_ranks),
        num_microbatches=1 + max((span.action.microbatch for span in timeline.spans), default=0),
        actions=actions,
        placement="v" if first_has_last and timeline.num_ranks > 1 else "round_robin",
        widths=tuple(sum(stage in held for held in stages) for stage in range(num_stages))
        if num_stages < timeline.num_ranks
        else (),
    )


def lost_time(
    worked: Timeline,
    schedule: Schedule,
    portals: Portals,
    *,
    inputs: Sequence[tuple[float, float] | None],
    end: float,
) -> LostTime:
    """Attribute the time of one pipeline's step to its causes.

    Args:
        worked: All actions of the schedule as measured, `without_waits`; without the optimizer's.
        schedule: What each rank did, in the order in which it did it.
        portals: As for `simulate`.
        inputs: By rank, when it began to wait for its batch and when it had it, on the clock of the timeline; None
            where that is unknown.
        end: When the step ended, optimizer included, on the same clock.
    """
    first = [min((s.start for s in worked.spans if s.rank == rank), default=0.0) for rank in range(worked.num_ranks)]
    waits = [
        (min(first), min(first)) if known is None else (min(known[0], start), min(known[1], start))
        for known, start in zip(inputs, first, strict=True)
    ]
    origin = max(begin for begin, _ in waits)
    waits = [(begin - origin, ready - origin) for begin, ready in waits]  # begins are 0 or less
    seconds = {span.action: span.end - span.start for span in worked.spans}
    gaps, is_message = _gaps(worked, schedule, portals, [ready + origin for _, ready in waits])
    levels = _levels(schedule, portals, seconds, gaps, is_message, waits)
    last = max((span.end for span in worked.spans), default=origin) - origin
    optimizer = max(0.0, end - origin - last)
    # A condition that is better than the one before, as uneven stages may be for some schedules, adds nothing.
    reached, added = levels["work"], {"work": levels["work"]}
    for name, makespan in levels.items():
        before, reached = reached, min(last, max(reached, makespan))
        added.setdefault(name, reached - before)
    added["input"] += last - reached
    total = TimeByCause(**added, optimizer=optimizer)
    rows = []
    for rank, row in enumerate(schedule.actions):
        work = sum(seconds[action] for action in row if action.kind is not Kind.REDUCE)
        reduce = sum(seconds[action] for action in row if action.kind is Kind.REDUCE)
        messages = reduce + sum(gaps[action] for action in row if is_message[action])
        other = sum(gaps[action] for action in row if not is_message[action])
        waited = max(0.0, waits[rank][1])
        rest = max(0.0, last - work - messages - other - waited)
        bubble = min(rest, total.bubble)
        rows.append(
            TimeByCause(
                work=work,
                bubble=bubble,
                imbalance=rest - bubble,
                communication=messages,
                input=waited,
                other=other,
                optimizer=optimizer,
            )
        )
    firsts = [row[0] for row in schedule.actions]
    return LostTime(total, tuple(rows), tuple(0.0 if is_message[each] else gaps[each] for each in firsts))


def mean_of_pipelines(pipelines: Sequence[LostTime]) -> LostTime:
    """The lost time of several pipelines: the mean of their totals, and the rows of all."""
    names = [field.name for field in fields(TimeByCause)]
    means = {name: statistics.fmean(getattr(one.total, name) for one in pipelines) for name in names}
    rows = tuple(row for one in pipelines for row in one.ranks)
    return LostTime(TimeByCause(**means), rows, tuple(start for one in pipelines for start in one.starts))


def _gaps(
    worked: Timeline, schedule: Schedule, portals: Portals, ready: Sequence[float]
) -> tuple[dict[Action, float], dict[Action, bool]]:
    """By action, the seconds since all that it needs had ended, and whether a message came or went in them."""
    starts = {span.action: span.start for span in worked.spans}
    ends = {span.action: span.end for span in worked.spans}
    ranks = {action: rank for rank, row in enumerate(schedule.actions) for action in row}
    gaps: dict[Action, float] = {}
    is_message: dict[Action, bool] = {}
    before = prerequisites(schedule, portals)
    for rank, row in enumerate(schedule.actions):
        free, sends = ready[rank], False
        for action in row:
            receives = any(ranks[needed] != rank for needed in before[action])
            begin = max([free, *(ends[needed] for needed in before[action])])
            gaps[action] = max(0.0, starts[action] - begin)
            is_message[action] = receives or sends or action.kind is Kind.REDUCE
            free = ends[action]
            sends = any(schedule.target_of(message) != rank for message in made_by(action, portals))
    return gaps, is_message


def _levels(
    schedule: Schedule,
    portals: Portals,
    seconds: Mapping[Action, float],
    gaps: Mapping[Action, float],
    is_message: Mapping[Action, bool],
    waits: Sequence[tuple[float, float]],
) -> dict[str, float]:
    """The end of the actions under each condition, the most ideal one first."""
    begins, ready = [begin for begin, _ in waits], [ready for _, ready in waits]
    computed = {action: 0.0 if action.kind is Kind.REDUCE else spent for action, spent in seconds.items()}

    def makespan(spent: Mapping[Action, float], released: Sequence[float] = begins) -> float:
        return max((span.end for span in replay(schedule, portals, spent, released).spans), default=0.0)

    hosted = {action: spent + gaps[action] * (not is_message[action]) for action, spent in computed.items()}
    delayed = {action: spent + gaps[action] for action, spent in seconds.items()}
    return {
        "work": sum(computed.values()) / schedule.num_ranks,
        "bubble": makespan(_equal_stages(computed)),
        "imbalance": makespan(_means(computed, lambda action: (action.kind, action.stage))),
        "variation": makespan(computed),
        "other": makespan(hosted),
        "communication": makespan(delayed),
        "input": makespan(delayed, ready),
    }


def _means(seconds: Mapping[Action, float], key: Callable[[Action], object]) -> dict[Action, float]:
    """Replace the seconds of each action by the mean over actions with the same key."""
    groups: dict[object, list[float]] = {}
    for action, spent in seconds.items():
        groups.setdefault(key(action), []).append(spent)
    return {action: statistics.fmean(groups[key(action)]) for action in seconds}


def _equal_stages(seconds: Mapping[Action, float]) -> dict[Action, float]:
    """Give all forwards the same seconds, and all backwards, whether they are split or not."""
    by_kind: dict[Kind, list[float]] = {}
    for action, spent in seconds.items():
        by_kind.setdefault(action.kind, []).append(spent)

    def total(kinds: Iterable[Kind]) -> float:
        return sum(sum(by_kind.get(kind, ())) for kind in kinds)

    full, inputs, weights = (len(by_kind.get(kind, ())) for kind in (Kind.B, Kind.I, Kind.W))
    backward = total((Kind.B, Kind.I, Kind.W)) / max(1, full + inputs)
    split = total((Kind.I, Kind.W))
    share = total((Kind.I,)) / split if split else 1.0
    each = {
        Kind.F: total((Kind.F,)) / max(1, len(by_kind.get(Kind.F, ()))),
        Kind.B: backward,
        Kind.I: backward * share,
        Kind.W: backward * (1 - share) * inputs / max(1, weights),
    }
    return {action: each.get(action.kind, 0.0) for action in seconds}
