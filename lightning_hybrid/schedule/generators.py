"""The pipeline schedules, each a small function from sizes to a `Schedule`.

In the drawings time runs to the right; F, B and R are forward, backward and reduction, the digit is the microbatch,
dots are the bubble; I and W are the two parts of a backward that is split. All schedules run the microbatches of one
stage in ascending order, forward and backward: so gradients are summed in one order and all schedules give bitwise
equal results.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import lru_cache

from lightning_hybrid.schedule.actions import (
    Action,
    Kind,
    Placement,
    Schedule,
    alternated,
    check_sizes,
    check_stages,
    stages_of_rank,
    with_reductions,
)
from lightning_hybrid.schedule.search import StageCosts, search_schedule
from lightning_hybrid.schedule.v_shape import dualpipe_v, zero_bubble_v
from lightning_hybrid.schedule.widths import with_widths


def gpipe(num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """All forwards, then all backwards (GPipe, Huang et al. 2019).

    With several stages per rank each stage sees all microbatches before the next one does (breadth first,
    Lamy-Poirier 2023).
    """
    # rank 0  F0 F1 F2 F3 .. .. .. .. B0 B1 B2 B3 R
    # rank 1  .. F0 F1 F2 F3 .. .. B0 B1 B2 B3 R
    # rank 2  .. .. F0 F1 F2 F3 B0 B1 B2 B3 R      (B0 waits for the last forward)
    check_sizes(num_ranks, num_microbatches, stages_per_rank)
    warmups = [stages_per_rank * num_microbatches] * num_ranks
    return _alternating("gpipe", stages_per_rank, [range(num_microbatches)], warmups)


def one_f_one_b(num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """One forward, one backward (PipeDream-flush, Narayanan et al. 2021, section 2.2).

    The bubble of GPipe, but rank r holds at most `num_ranks - r` microbatches. More than one stage per rank means
    `interleaved_1f1b`.
    """
    # rank 0  F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3 R    warm-up of 2 forwards
    # rank 1  .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 R       warm-up of 1
    # rank 2  .. .. F0 B0 F1 B1 F2 B2 F3 B3 R          no warm-up
    if stages_per_rank != 1:
        return interleaved_1f1b(num_ranks, num_microbatches, stages_per_rank)
    check_sizes(num_ranks, num_microbatches, stages_per_rank)
    return _alternating("1f1b", 1, [range(num_microbatches)], range(num_ranks)[::-1])


def eager_1f1b(num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """1F1B that starts with twice the forwards (eager-1F1B, Zhuang et al. 2022).

    The bubble of 1F1B, but what a rank needs was sent a forward or more before, so that neither transfers nor forwards
    and backwards of uneven length make it wait. Rank r holds at most `2 * (num_ranks - r) - 1` microbatches.

    Raises:
        ValueError: a size is below 1, or a rank has several stages.
    """
    # rank 0  F0 F1 F2 F3 F4 .. B0 F5 B1 .. B2 .. B3    warm-up of 4 forwards
    # rank 1  .. F0 F1 F2 .. B0 F3 B1 F4 B2             warm-up of 2
    # rank 2  .. .. F0 B0 F1 B1 F2 B2                   no warm-up
    check_sizes(num_ranks, num_microbatches, stages_per_rank)
    check_stages("eager_1f1b", stages_per_rank, 1)
    return _alternating("eager_1f1b", 1, [range(num_microbatches)], range(0, 2 * num_ranks, 2)[::-1])


def interleaved_1f1b(num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """1F1B over several stages per rank (Narayanan et al. 2021, section 2.2): a smaller bubble, more messages.

    Microbatches go in groups, as in Megatron, of `num_ranks` microbatches each. A number of microbatches that is no
    multiple of `num_ranks` makes the first groups larger: with m >= p microbatches on p ranks and v stages per rank the
    bubble is (p - 1) / (v * m + p - 1) for every m, at the price of the larger groups' activations.
    """
    # 2 ranks with 2 stages each: (0, 2) and (1, 3); 2F1 is stage 2, forward, microbatch 1
    # rank 0  0F0 0F1 2F0 2F1 ... 2B0 2B1 0B0 0B1     each stage in turn takes a group of microbatches, so the next
    # rank 1  ... 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1     stage's input is back just when it is wanted
    check_sizes(num_ranks, num_microbatches, stages_per_rank)
    if stages_per_rank == 1:
        return one_f_one_b(num_ranks, num_microbatches)
    groups = _groups(num_microbatches, num_ranks)
    first = (stages_per_rank - 1) * len(groups[0])
    warmups = [2 * (num_ranks - rank - 1) + first for rank in range(num_ranks)]
    return _alternating("interleaved_1f1b", stages_per_rank, groups, warmups)


def zero_bubble(num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """1F1B with backwards in two parts (ZB-H1, Qi et al. 2023, section 2): weights take the time in which ranks wait.

    I makes the gradients that the rank before waits for. W, those of the weights, comes r microbatches behind it on
    rank r. Where F, I and W take the same time and m >= p, the bubble is (p - 1) / (3 * m + p - 1), a third of
    1F1B's, and each rank holds what `num_ranks` microbatches need.

    Raises:
        ValueError: a size is below 1, or a rank has several stages.
    """
    # rank 0  F0 F1 F2 .. .. B0- F3 B1- .. B2- B3-       nobody waits for its gradients
    # rank 1  .. F0 F1 .. I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    # rank 2  .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    check_sizes(num_ranks, num_microbatches, stages_per_rank)
    check_stages("zero_bubble", stages_per_rank, 1)
    rows = []
    for rank, unsplit in enumerate(one_f_one_b(num_ranks, num_microbatches).actions):
        row: list[Action] = []
        for action in unsplit:
            if action.kind is Kind.B and rank:
                row.append(action._replace(kind=Kind.I))
                if action.microbatch >= rank:
                    row.append(Action(Kind.W, rank, action.microbatch - rank))
            elif action.kind is not Kind.REDUCE:
                row.append(action)
        if rank:
            row += [Action(Kind.W, rank, m) for m in range(max(0, num_microbatches - rank), num_microbatches)]
        rows.append(with_reductions(row))
    return Schedule("zero_bubble", num_ranks, 1, num_microbatches, tuple(rows))


@lru_cache(maxsize=64)
def zero_bubble_searched(
    num_ranks: int,
    num_microbatches: int,
    stages_per_rank: int = 1,
    *,
    max_in_flight: int | None = None,
    costs: StageCosts | None = None,
) -> Schedule:
    """The shortest schedule with split backwards that a search finds under a memory limit (Qi et al. 2023, section 3).

    Two stages per rank have the V placement. Never longer, under the same costs, than `zero_bubble` or `zero_bubble_v`
    where these keep the limit.

    Args:
        num_ranks: ranks of the pipeline.
        num_microbatches: of a batch.
        stages_per_rank: 1 or 2.
        max_in_flight: microbatches that a rank may hold at most, each in all of its stages; those of 1F1B,
            `num_ranks`, if None.
        costs: what forwards, backwards and messages take; equal for all stages if None.

    Raises:
        ValueError: a size is below 1, or a rank has more than two stages.
    """
    check_sizes(num_ranks, num_microbatches, stages_per_rank)
    check_stages("zero_bubble_searched", stages_per_rank, 1, 2)
    fixed: tuple[Schedule, ...]
    if stages_per_rank == 1:
        fixed = zero_bubble(num_ranks, num_microbatches), one_f_one_b(num_ranks, num_microbatches)
    else:
        fixed = zero_bubble_v(num_ranks, num_microbatches), dualpipe_v(num_ranks, num_microbatches)
    limit = num_ranks if max_in_flight is None else max_in_flight
    return search_schedule("zero_bubble_searched", fixed, limit, costs or StageCosts())


def forward_only(
    num_ranks: int, num_microbatches: int, stages_per_rank: int = 1, placement: Placement = "round_robin"
) -> Schedule:
    """Forwards alone, for validation, testing and prediction; nothing to reduce."""
    # rank 0  F0 F1 F2 F3
    # rank 1  .. F0 F1 F2 F3
    check_sizes(num_ranks, num_microbatches, stages_per_rank)
    rows = []
    for rank in range(num_ranks):
        stages = stages_of_rank(rank, num_ranks, stages_per_rank, placement)
        if placement == "v":  # the second stage of a rank gets its first microbatch when 2 (p - r) - 1 have gone down
            first, second = ([Action(Kind.F, stage, m) for m in range(num_microbatches)] for stage in stages)
            rows.append(alternated(first, second, warmup=2 * (num_ranks - rank - 1)))
            continue
        rows.append(_passes(Kind.F, stages, _groups(num_microbatches, num_ranks)))
    actions = tuple(map(tuple, rows))
    return Schedule("forward_only", num_ranks, stages_per_rank, num_microbatches, actions, placement)


_GENERATORS: dict[str, Callable[[int, int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "eager_1f1b": eager_1f1b,
    "interleaved_1f1b": interleaved_1f1b,
    "zero_bubble": zero_bubble,
    "zero_bubble_v": zero_bubble_v,
    "dualpipe_v": dualpipe_v,
    "zero_bubble_searched": zero_bubble_searched,
}

SCHEDULE_NAMES = tuple(_GENERATORS)

_IN_V_PLACEMENT = ("zero_bubble_v", "dualpipe_v")


def stages_of_each_rank(name: str, stages_per_rank: int) -> int:
    """The stages per rank of a schedule; two where it always has two and the default of one is requested."""
    return 2 if name in _IN_V_PLACEMENT and stages_per_rank == 1 else stages_per_rank


def placement_of(name: str, stages_per_rank: int) -> Placement:
    """The placement of the stages of a schedule."""
    is_v = name in _IN_V_PLACEMENT or (name == "zero_bubble_searched" and stages_per_rank == 2)
    return "v" if is_v else "round_robin"


def make_schedule(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    stages_per_rank: int = 1,
    *,
    max_in_flight: int | None = None,
    costs: StageCosts | None = None,
    widths: Sequence[int] = (),
) -> Schedule:
    """The training schedule with a name from `SCHEDULE_NAMES`.

    Args:
        name: of the schedule.
        num_ranks: ranks of the pipeline.
        num_microbatches: of a batch.
        stages_per_rank: stages that each rank holds; schedules that always have two take 1 as 2.
        max_in_flight: as for `zero_bubble_searched`, which alone has such a limit.
        costs: as for `zero_bubble_searched`; the other schedules do not depend on costs.
        widths: the number of ranks of each stage, `num_ranks` in all; one each if empty.

    Raises:
        ValueError: there is no schedule of this name, or a size is below 1, or no limit can be set.
    """
    if name not in _GENERATORS:
        raise ValueError(f"no schedule is named {name!r}; choose one of {', '.join(map(repr, SCHEDULE_NAMES))}")
    if widths:
        return with_widths(name, widths, num_microbatches)
    if name == "zero_bubble_searched":
        return zero_bubble_searched(
            num_ranks, num_microbatches, stages_per_rank, max_in_flight=max_in_flight, costs=costs
        )
    if max_in_flight is not None:
        raise ValueError(
            f"max_microbatches_in_flight={max_in_flight} limits the search of schedule='zero_bubble_searched', and"
            f" schedule={name!r} has a fixed order; set schedule='zero_bubble_searched', or leave the limit out"
        )
    return _GENERATORS[name](num_ranks, num_microbatches, stages_of_each_rank(name, stages_per_rank))


def _groups(num_microbatches: int, least: int) -> list[range]:
    """Cut the microbatches into as many groups of at least `least` as fit, the larger groups first."""
    # A smaller group would starve the last ranks; a later group that is larger than the first would deadlock, because
    # the warm-up is as long as the first group needs.
    num_groups = max(1, num_microbatches // least)
    size, larger = divmod(num_microbatches, num_groups)
    starts = [i * size + min(i, larger) for i in range(num_groups + 1)]
    return [range(start, end) for start, end in itertools.pairwise(starts)]


def _passes(kind: Kind, stages: Sequence[int], groups: Sequence[range]) -> list[Action]:
    """Groups of microbatches one after the other, each through all stages in turn."""
    return [Action(kind, stage, m) for group in groups for stage in stages for m in group]


def _alternating(name: str, stages_per_rank: int, groups: Sequence[range], warmups: Sequence[int]) -> Schedule:
    """Groups pass the stages of each rank, which begins with its `warmup` of forwards and then alternates."""
    rows = []
    for rank, warmup in enumerate(warmups):
        stages = stages_of_rank(rank, len(warmups), stages_per_rank)
        forwards, backwards = _passes(Kind.F, stages, groups), _passes(Kind.B, stages[::-1], groups)
        rows.append(with_reductions(alternated(forwards, backwards, warmup)))
    return Schedule(name, len(warmups), stages_per_rank, sum(map(len, groups)), tuple(rows))
