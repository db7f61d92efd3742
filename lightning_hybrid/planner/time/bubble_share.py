"""What of the other ranks' work the slowest pipeline rank waits for under a schedule: `bubble_share`."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from lightning_hybrid.schedule.generators import make_schedule
from lightning_hybrid.schedule.linked_stages_and_messages import chain
from lightning_hybrid.schedule.schedule_and_actions import Kind
from lightning_hybrid.schedule.simulator import replay

_STEPS = 40  # of a simulation, in a microbatch's time of a stage
_MOST_RANKS, _MOST_ROUNDS = 8, 3  # of a simulation; the share hardly depends on more
_SIMULATED = ("zero_bubble_v", "dualpipe_v", "zero_bubble_searched")


@dataclass(frozen=True)
class StageShares:
    """Costs of one microbatch on the stages of a pipeline, those between the ends taken to be equal.

    Attributes:
        forward: Share of the forward in a stage's time.
        weights: Share of the gradients of weights, which a schedule may defer.
        first: Time of the first stage, relative to those between.
        last: The same of the last stage.
    """

    forward: float
    weights: float
    first: float = 1.0
    last: float = 1.0


def needs_stages(schedule: str) -> bool:
    """Whether the share depends on the ends of the pipeline: it is then simulated."""
    return schedule in _SIMULATED


def bubble_share(
    schedule: str, num_ranks: int, num_microbatches: int, stages_per_rank: int, costs: StageShares
) -> float:
    """Return the time that the slowest rank waits, over the mean time of a stage of each other rank.

    A schedule that does not split backwards waits for all of it (Narayanan et al., arXiv 2104.04473, section 2.2), and
    ZB-H1 for what the gradients of weights do not fill, ``F + I - W`` of ``F + I + W`` (Qi et al., arXiv 2401.10241,
    table 2). The others are simulated.

    Args:
        schedule: Its name.
        num_ranks: Pipeline ranks.
        num_microbatches: Microbatches of one step and replica.
        stages_per_rank: Stages that each rank holds.
        costs: Of the stages.
    """
    p, m, v = num_ranks, num_microbatches, stages_per_rank
    if p == 1:
        return 1.0
    if schedule == "zero_bubble" and m >= p:
        return 1.0 - 2.0 * costs.weights
    if schedule in ("1f1b", "interleaved_1f1b") and m < p:  # each microbatch goes round alone
        return (v * (p - m) + m - 1) / (p - 1)
    if schedule not in (*_SIMULATED, "zero_bubble"):
        return 1.0
    ranks = min(p, _MOST_RANKS)
    microbatches = max(1, round(min(m, _MOST_ROUNDS * p) * ranks / p))
    parts = (round(part * _STEPS) for part in (costs.forward, costs.weights, costs.first, costs.last))
    return _simulated(schedule, ranks, microbatches, v, *parts)


@functools.lru_cache(maxsize=4096)
def _simulated(name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int, *parts: int) -> float:
    """The same, with the shares as numbers of steps."""
    forward, weights, first, last = (part / _STEPS for part in parts)
    schedule = make_schedule(name, num_ranks, num_microbatches, stages_per_rank)
    inputs = max(0.0, 1.0 - forward - weights)
    seconds = {Kind.F: forward, Kind.I: inputs, Kind.W: weights, Kind.B: inputs + weights, Kind.REDUCE: 0.0}
    stages = [first, *[1.0] * (schedule.num_stages - 2), last]
    of_actions = {action: seconds[action.kind] * stages[action.stage] for row in schedule.actions for action in row}
    step = replay(schedule, chain(schedule.num_stages), of_actions).makespan_seconds
    busy = [0.0] * num_ranks
    for stage, time in enumerate(stages):
        busy[schedule.rank_of(stage)] += time
    waited = step - num_microbatches * max(busy)
    return waited * schedule.stages_per_rank / (sum(busy) - max(busy))
