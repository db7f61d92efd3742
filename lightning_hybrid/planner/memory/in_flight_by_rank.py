"""The microbatches that the stages of each pipeline rank hold at its peak, in closed form for the common schedules."""

from __future__ import annotations

import functools

from lightning_hybrid.schedule.generators import SCHEDULE_NAMES, make_schedule
from lightning_hybrid.schedule.schedule_and_actions import Action, Kind

_V_WARM_UP = {"zero_bubble_v": 0, "dualpipe_v": 1}  # microbatches of a rank's first stage beyond those of ZB-V


@functools.lru_cache(maxsize=4096)
def in_flight_by_rank(
    schedule: str, num_ranks: int, num_microbatches: int, stages_per_rank: int
) -> tuple[tuple[int, ...], ...]:
    """Return for each rank the microbatches of each of its stages that are between forward and backward at its peak.

    The peak is the first backward: a rank then has all forwards of its warm-up in flight, and later as many at most.
    A searched zero-bubble schedule holds what its limit allows, as many as there are pipeline ranks. Schedules without
    a closed form are generated, for at most four microbatches per rank.

    Args:
        schedule: Name of the schedule; "1f1b" with several stages per rank is the interleaved one.
        num_ranks: Pipeline ranks.
        num_microbatches: Microbatches of one step and replica.
        stages_per_rank: Stages of each rank.
    """
    m, p = num_microbatches, num_ranks
    if schedule == "gpipe":
        return ((m,) * stages_per_rank,) * p
    if schedule in _V_WARM_UP:
        return tuple((min(m, 2 * p - rank - 1 + _V_WARM_UP[schedule]), min(m, rank + 1)) for rank in range(p))
    if stages_per_rank == 1:
        warm_up = {"1f1b": 1, "interleaved_1f1b": 1, "eager_1f1b": 2}
        if schedule in warm_up:
            return tuple((min(m, warm_up[schedule] * (p - 1 - rank) + 1),) for rank in range(p))
        if schedule in ("zero_bubble", "zero_bubble_searched"):
            return ((min(m, p),),) * p
    elif schedule in ("1f1b", "interleaved_1f1b"):
        return tuple(_interleaved(m, p, stages_per_rank, rank) for rank in range(p))
    name = schedule if schedule in SCHEDULE_NAMES else "1f1b"
    return tuple(_at_peak(row) for row in make_schedule(name, p, min(m, 4 * p), stages_per_rank).actions)


def _at_peak(row: tuple[Action, ...]) -> tuple[int, ...]:
    """Microbatches of each stage, in ascending order of the stages, when all of them together are most."""
    now = dict.fromkeys(sorted({action.stage for action in row}), 0)
    peak: tuple[int, ...] = ()
    for action in row:
        now[action.stage] += {Kind.F: 1, Kind.B: -1, Kind.W: -1}.get(action.kind, 0)
        if sum(now.values()) > sum(peak):
            peak = tuple(now.values())
    return peak


def _interleaved(num_microbatches: int, num_ranks: int, stages_per_rank: int, rank: int) -> tuple[int, ...]:
    """Forwards of each stage before the first backward: groups of microbatches go through all stages in turn."""
    num_groups = max(1, num_microbatches // num_ranks)
    size, larger = divmod(num_microbatches, num_groups)
    first = size + (larger > 0)
    left = min(2 * (num_ranks - rank - 1) + (stages_per_rank - 1) * first + 1, stages_per_rank * num_microbatches)
    started, group = [0] * stages_per_rank, 0
    while left > 0:
        members = size + (group < larger)
        for stage in range(stages_per_rank):
            taken = min(left, members)
            started[stage] += taken
            left -= taken
        group += 1
    return tuple(started)
