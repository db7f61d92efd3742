"""List scheduling of forwards and split backwards: whenever a rank is free, rules choose among what it could run.

The rules are those of the automatic scheduler of Qi et al. 2023 (section 3.1): a backward for its inputs goes first,
forwards fill the memory, and gradients of weights fill the time in which a rank would wait. Which rules are best
depends on the sizes and costs: `search_schedule` tries them under a memory limit.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lightning_hybrid.schedule.actions import Action, Kind, Placement, Schedule, chain, rank_of_stage, with_reductions
from lightning_hybrid.schedule.in_flight import most_in_flight
from lightning_hybrid.schedule.simulator import simulate
from lightning_hybrid.schedule.v_shape import unsplit_first_stage


@dataclass(frozen=True)
class StageCosts:
    """What a schedule is planned for, in seconds or any other unit; a number, or one per stage.

    Attributes:
        forward: of a microbatch.
        backward: of a microbatch; half of it are the gradients of the inputs.
        transfer: of a message between ranks.
    """

    forward: float | tuple[float, ...] = 1.0
    backward: float | tuple[float, ...] = 2.0
    transfer: float = 0.0

    def of_stages(self, num_stages: int) -> tuple[list[float], list[float]]:
        """Forward and backward of each stage.

        Raises:
            ValueError: a tuple is not one number per stage.
        """
        lists = []
        for name, costs in (("forward", self.forward), ("backward", self.backward)):
            each = [float(costs)] * num_stages if isinstance(costs, (int, float)) else [float(cost) for cost in costs]
            if len(each) != num_stages:
                raise ValueError(f"{name} costs are {len(each)} for {num_stages} stages; give one number per stage")
            lists.append(each)
        return lists[0], lists[1]


@dataclass(frozen=True)
class Rules:
    """How a rank that is free chooses.

    Attributes:
        alternates: after a backward, a forward goes before the next backward.
        holds: nothing starts that would delay a backward whose message is known to arrive meanwhile.
        later_forward_first: of two stages, the forward of the later one goes first.
        later_backward_first: of two stages, the backward of the later one goes first.
        limits_warmup: the first stage of rank r runs at most v (p - r) - (v - 1) forwards before the first backward,
            for v stages per rank.
    """

    alternates: bool = False
    holds: bool = False
    later_forward_first: bool = True
    later_backward_first: bool = True
    limits_warmup: bool = True


@dataclass(frozen=True)
class Sizes:
    """The sizes of a pipeline, and the most pairs of stage and microbatch whose activations a rank may hold."""

    num_ranks: int
    num_microbatches: int
    stages_per_rank: int
    placement: Placement
    max_in_flight: int


def list_schedule(sizes: Sizes, costs: StageCosts, rules: Rules) -> tuple[float, list[list[Action]]]:
    """Schedule all microbatches by rules.

    Returns:
        The time at which the last rank ends, and each rank's actions in order. Every stage runs its microbatches in
        ascending order.
    """
    # The rank keeps room for the later stages of the microbatches that it has begun: so the oldest can always end.
    assert sizes.max_in_flight >= sizes.stages_per_rank
    run = _Run(sizes, costs, rules)
    while run.events:
        time, rank = heapq.heappop(run.events)
        if run.free_at[rank] <= time:
            run.start_next(rank, time)
    return max(run.free_at), run.rows


class _Run:
    """The state of all ranks at one time."""

    def __init__(self, sizes: Sizes, costs: StageCosts, rules: Rules) -> None:
        self._sizes, self._rules = sizes, rules
        p, v = sizes.num_ranks, sizes.stages_per_rank
        count = p * v
        self._rank_of = [rank_of_stage(stage, p, sizes.placement) for stage in range(count)]
        self._stages: list[list[int]] = [[] for _ in range(p)]
        for stage, rank in enumerate(self._rank_of):
            self._stages[rank].append(stage)
        self._forward, backward = costs.of_stages(count)
        self._half = [seconds / 2 for seconds in backward]
        self._transfer = costs.transfer
        self._tolerance = 1e-9 * (sum(self._forward) + sum(backward))
        # By stage: when the inputs of each microbatch arrive, as far as known, and how many microbatches have run.
        self._inputs: list[list[float]] = [[] for _ in range(count)]
        self._gradients: list[list[float]] = [[] for _ in range(count)]
        self._forwards, self._backwards = [0] * count, [0] * count
        self._deferred: list[deque[Action]] = [deque() for _ in range(p)]
        self._in_flight, self._was_backward = [0] * p, [False] * p
        self.free_at = [0.0] * p
        self.rows: list[list[Action]] = [[] for _ in range(p)]
        self.events: list[tuple[float, int]] = [(0.0, self._rank_of[0])]
        self._inputs[0] = [0.0] * sizes.num_microbatches

    def start_next(self, rank: int, time: float) -> None:
        """Start what the rules choose, if anything."""
        forward, backward = self._ready_forward(rank, time), self._ready_backward(rank, time)
        if backward is not None and (forward is None or not (self._rules.alternates and self._was_backward[rank])):
            self._start(rank, Action(Kind.I, backward, self._backwards[backward]), time, self._half[backward])
            return
        until = self._next_gradient(rank, time) if self._rules.holds and backward is None else float("inf")
        if forward is not None and time + self._forward[forward] <= until + self._tolerance:
            self._start(rank, Action(Kind.F, forward, self._forwards[forward]), time, self._forward[forward])
        elif self._deferred[rank]:
            action = self._deferred[rank][0]
            if time + self._half[action.stage] <= until + self._tolerance:
                self._start(rank, self._deferred[rank].popleft(), time, self._half[action.stage])

    def _start(self, rank: int, action: Action, time: float, seconds: float) -> None:
        stage, end = action.stage, time + seconds
        self.free_at[rank] = end
        self.rows[rank].append(action)
        heapq.heappush(self.events, (end, rank))
        if action.kind is Kind.F:
            self._forwards[stage] += 1
            self._in_flight[rank] += 1
            if stage + 1 < len(self._rank_of):
                self._deliver(self._inputs, rank, stage + 1, end)
            else:
                self._gradients[stage].append(end)
        elif action.kind is Kind.I:
            self._backwards[stage] += 1
            self._deferred[rank].append(action._replace(kind=Kind.W))
            if stage:
                self._deliver(self._gradients, rank, stage - 1, end)
        else:
            self._in_flight[rank] -= 1
        if action.kind is not Kind.W:
            self._was_backward[rank] = action.kind is Kind.I

    def _deliver(self, arrivals: list[list[float]], rank: int, stage: int, end: float) -> None:
        target = self._rank_of[stage]
        arrival = end if target == rank else end + self._transfer
        arrivals[stage].append(arrival)
        if target != rank:
            heapq.heappush(self.events, (arrival, target))

    def _ready_forward(self, rank: int, time: float) -> int | None:
        """The stage whose next forward can start, by the rules."""
        stages = self._stages[rank]
        for index in self._in_order(len(stages), self._rules.later_forward_first):
            stage = stages[index]
            done, arrivals = self._forwards[stage], self._inputs[stage]
            if done == len(arrivals) or arrivals[done] > time + self._tolerance:
                continue
            if self._in_flight[rank] + len(stages) - index > self._sizes.max_in_flight:
                continue
            if index == 0 and self._warms_up(rank) and done > len(stages) * (self._sizes.num_ranks - rank - 1):
                continue
            return stage
        return None

    def _warms_up(self, rank: int) -> bool:
        """Whether the number of forwards is limited until the first backward of the rank."""
        return self._rules.limits_warmup and not self._backwards[self._stages[rank][-1]]

    def _ready_backward(self, rank: int, time: float) -> int | None:
        """The stage whose next backward can start, by the rules."""
        stages = self._stages[rank]
        for index in self._in_order(len(stages), self._rules.later_backward_first):
            stage = stages[index]
            done, arrivals = self._backwards[stage], self._gradients[stage]
            if done < len(arrivals) and arrivals[done] <= time + self._tolerance:
                return stage
        return None

    def _next_gradient(self, rank: int, time: float) -> float:
        """When the next gradients that are on their way arrive."""
        waiting = [
            self._gradients[stage][self._backwards[stage]]
            for stage in self._stages[rank]
            if self._backwards[stage] < len(self._gradients[stage])
        ]
        return min((arrival for arrival in waiting if arrival > time), default=float("inf"))

    @staticmethod
    def _in_order(count: int, is_later_first: bool) -> Sequence[int]:
        return range(count - 1, -1, -1) if is_later_first else range(count)


# Actions that a search may place in all of its attempts: some seconds of one core.
_MAX_PLACED = 500_000


def search_schedule(name: str, fixed: tuple[Schedule, ...], max_in_flight: int, costs: StageCosts) -> Schedule:
    """The shortest of some schedules and of what `list_schedule` makes by all rules.

    It stops at a schedule that no order can shorten, or after a fixed number of placed actions: all ranks find the
    same.

    Args:
        name: of the result.
        fixed: known schedules of the wanted sizes, the preferred one first.
        max_in_flight: microbatches that a rank may hold, each in all of its stages.
        costs: what forwards, backwards and messages take.

    Raises:
        ValueError: the limit is below 1, or the costs are not one per stage.
    """
    if max_in_flight < 1:
        raise ValueError(f"a rank holds at least one microbatch, but max_microbatches_in_flight={max_in_flight}")
    like = fixed[0]
    sizes = Sizes(
        num_ranks=like.num_ranks,
        num_microbatches=like.num_microbatches,
        stages_per_rank=like.stages_per_rank,
        placement=like.placement,
        max_in_flight=max_in_flight * like.stages_per_rank,
    )
    least = _least_seconds(like, costs)
    best: tuple[float, Schedule] | None = None
    for seconds, schedule in itertools.chain(_within_limit(fixed, sizes, costs), _scheduled(like, sizes, costs)):
        if best is None or seconds < best[0] * (1 - 1e-9):
            best = seconds, schedule
        if best[0] <= least * (1 + 1e-9):
            break
    assert best is not None
    return replace(best[1], name=name)


def _within_limit(fixed: Sequence[Schedule], sizes: Sizes, costs: StageCosts) -> Iterator[tuple[float, Schedule]]:
    """The known schedules that keep the limit, with their times."""
    for schedule in fixed:
        if max(most_in_flight(schedule)) <= sizes.max_in_flight:
            forward, backward = costs.of_stages(schedule.num_stages)
            timeline = simulate(
                schedule,
                chain(schedule.num_stages),
                forward_seconds=forward,
                backward_seconds=backward,
                transfer_seconds=costs.transfer,
            )
            yield timeline.makespan_seconds, schedule


def _scheduled(like: Schedule, sizes: Sizes, costs: StageCosts) -> Iterator[tuple[float, Schedule]]:
    """The schedules of all rules, with their times."""
    several = like.stages_per_rank > 1
    both, one = (True, False), (True,)
    each = 3 * like.num_stages * like.num_microbatches
    choices = itertools.product(both, both, both if several else one, both if several else one, both)
    for attempt, (warmup, backward_first, later_forward, later_backward, holds) in enumerate(choices):
        if attempt and (attempt + 1) * each > _MAX_PLACED:
            return
        rules = Rules(not backward_first, holds, later_forward, later_backward, warmup)
        seconds, rows = list_schedule(sizes, costs, rules)
        actions = tuple(with_reductions(unsplit_first_stage(row)) for row in rows)
        yield seconds, replace(like, actions=actions)


def _least_seconds(like: Schedule, costs: StageCosts) -> float:
    """A time below which no order can come: each rank waits for its first input, then does all of its work."""
    forward, backward = costs.of_stages(like.num_stages)
    least = 0.0
    for rank in range(like.num_ranks):
        stages = [stage for stage in range(like.num_stages) if rank in like.ranks_of_stages[stage]]
        work = like.num_microbatches * sum(forward[stage] + backward[stage] for stage in stages)
        least = max(least, sum(forward[: stages[0]]) + costs.transfer * stages[0] + work)
    return least
