"""The search for the shortest schedule with split backwards under a memory limit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from lightning_hybrid.schedule.linked_stages_and_messages import chain
from lightning_hybrid.schedule.microbatches_in_flight import most_in_flight
from lightning_hybrid.schedule.schedule_and_actions import Schedule, with_reductions
from lightning_hybrid.schedule.simulator import simulate
from lightning_hybrid.schedule.zero_bubble.list_scheduler import Rules, Sizes, StageCosts, list_schedule
from lightning_hybrid.schedule.zero_bubble.schedules_in_v_placement import unsplit_first_stage

# Actions that a search may place in all of its attempts: some seconds of one core.
_MAX_PLACED = 500_000


def search_schedule(name: str, fixed: tuple[Schedule, ...], max_in_flight: int, costs: StageCosts) -> Schedule:
    """The shortest of some schedules and of those that `list_schedule` makes by all rules.

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
        stages = [stage for stage in range(like.num_stages) if like.rank_of(stage) == rank]
        work = like.num_microbatches * sum(forward[stage] + backward[stage] for stage in stages)
        least = max(least, sum(forward[: stages[0]]) + costs.transfer * stages[0] + work)
    return least
