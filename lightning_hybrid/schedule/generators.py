"""The pipeline schedules, each a small function from sizes to a `Schedule`.

In the drawings time runs to the right; F, B and R are forward, backward and reduction, the digit is the microbatch,
dots are the bubble; I and W are the two parts of a backward that is split. All schedules run the microbatches of one
stage in ascending order, forward and backward: so gradients are summed in one order and all schedules give bitwise
equal results.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from lightning_hybrid.schedule.schedule_and_actions import Action, Kind, Schedule


def gpipe(num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """All forwards, then all backwards (GPipe, Huang et al. 2019).

    With several stages per rank each stage sees all microbatches before the next one does (breadth first,
    Lamy-Poirier 2023).
    """
    # rank 0  F0 F1 F2 F3 .. .. .. .. B0 B1 B2 B3 R
    # rank 1  .. F0 F1 F2 F3 .. .. B0 B1 B2 B3 R
    # rank 2  .. .. F0 F1 F2 F3 B0 B1 B2 B3 R      (B0 waits for the last forward)
    _check_sizes(num_ranks, num_microbatches, stages_per_rank)
    microbatches = range(num_microbatches)
    rows = []
    for rank in range(num_ranks):
        stages = range(rank, num_ranks * stages_per_rank, num_ranks)
        forwards = [Action(Kind.F, stage, m) for stage in stages for m in microbatches]
        backwards = [Action(Kind.B, stage, m) for stage in reversed(stages) for m in microbatches]
        rows.append(forwards + backwards)
    return _schedule("gpipe", num_ranks, num_microbatches, stages_per_rank, rows)


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
    _check_sizes(num_ranks, num_microbatches, stages_per_rank)
    return _one_stage_each("1f1b", num_ranks, num_microbatches, warmup_per_rank=1)


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
    _check_sizes(num_ranks, num_microbatches, stages_per_rank)
    _check_one_stage("eager_1f1b", stages_per_rank)
    return _one_stage_each("eager_1f1b", num_ranks, num_microbatches, warmup_per_rank=2)


def interleaved_1f1b(num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """1F1B over several stages per rank (Narayanan et al. 2021, section 2.2): a smaller bubble, more messages.

    Microbatches go in groups, as in Megatron, of `num_ranks` microbatches each. A number of microbatches that is no
    multiple of `num_ranks` makes the first groups larger: with m >= p microbatches on p ranks and v stages per rank the
    bubble is (p - 1) / (v * m + p - 1) for every m, at the price of the larger groups' activations.
    """
    # 2 ranks with 2 stages each: (0, 2) and (1, 3); 2F1 is stage 2, forward, microbatch 1
    # rank 0  0F0 0F1 2F0 2F1 ... 2B0 2B1 0B0 0B1     each stage in turn takes a group of microbatches, so the next
    # rank 1  ... 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1     stage's input is back just when it is wanted
    _check_sizes(num_ranks, num_microbatches, stages_per_rank)
    if stages_per_rank == 1:
        return one_f_one_b(num_ranks, num_microbatches)
    groups = _groups(num_microbatches, num_ranks)
    rows = []
    for rank in range(num_ranks):
        stages = range(rank, num_ranks * stages_per_rank, num_ranks)
        forwards = [Action(Kind.F, s, m) for group in groups for s in stages for m in group]
        backwards = [Action(Kind.B, s, m) for group in groups for s in reversed(stages) for m in group]
        warmup = 2 * (num_ranks - rank - 1) + (stages_per_rank - 1) * len(groups[0])
        rows.append(_alternate(forwards, backwards, warmup))
    return _schedule("interleaved_1f1b", num_ranks, num_microbatches, stages_per_rank, rows)


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
    _check_sizes(num_ranks, num_microbatches, stages_per_rank)
    _check_one_stage("zero_bubble", stages_per_rank)
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
        rows.append(row)
    return _schedule("zero_bubble", num_ranks, num_microbatches, 1, rows)


def forward_only(num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """Forwards alone, for validation, testing and prediction; nothing to reduce."""
    # rank 0  F0 F1 F2 F3
    # rank 1  .. F0 F1 F2 F3
    _check_sizes(num_ranks, num_microbatches, stages_per_rank)
    rows = []
    for rank in range(num_ranks):
        stages = range(rank, num_ranks * stages_per_rank, num_ranks)
        groups = _groups(num_microbatches, num_ranks)
        rows.append([Action(Kind.F, s, m) for group in groups for s in stages for m in group])
    return _schedule("forward_only", num_ranks, num_microbatches, stages_per_rank, rows)


_GENERATORS: dict[str, Callable[[int, int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "eager_1f1b": eager_1f1b,
    "interleaved_1f1b": interleaved_1f1b,
    "zero_bubble": zero_bubble,
}

SCHEDULE_NAMES = tuple(_GENERATORS)


def make_schedule(name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """The training schedule with a name from `SCHEDULE_NAMES`.

    Raises:
        ValueError: there is no schedule of this name, or a size is below 1.
    """
    if name not in _GENERATORS:
        raise ValueError(f"no schedule is named {name!r}; choose one of {', '.join(map(repr, SCHEDULE_NAMES))}")
    return _GENERATORS[name](num_ranks, num_microbatches, stages_per_rank)


def _check_sizes(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> None:
    sizes = {"num_ranks": num_ranks, "num_microbatches": num_microbatches, "stages_per_rank": stages_per_rank}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"a schedule needs {name} >= 1 but got {name}={size}")


def _check_one_stage(name: str, stages_per_rank: int) -> None:
    if stages_per_rank != 1:
        raise ValueError(
            f"schedule={name!r} runs one stage per rank, not stages_per_rank={stages_per_rank}; set"
            " stages_per_rank=1 or schedule='interleaved_1f1b'"
        )


def _one_stage_each(name: str, num_ranks: int, num_microbatches: int, warmup_per_rank: int) -> Schedule:
    """Each rank starts with `warmup_per_rank` forwards more than the rank behind it."""
    rows = []
    for rank in range(num_ranks):
        forwards = [Action(Kind.F, rank, m) for m in range(num_microbatches)]
        backwards = [Action(Kind.B, rank, m) for m in range(num_microbatches)]
        rows.append(_alternate(forwards, backwards, warmup=warmup_per_rank * (num_ranks - rank - 1)))
    return _schedule(name, num_ranks, num_microbatches, 1, rows)


def _groups(num_microbatches: int, least: int) -> list[range]:
    """Cut the microbatches into as many groups of at least `least` as fit, the larger groups first."""
    # A smaller group would starve the last ranks; a later group that is larger than the first would deadlock, because
    # the warm-up is as long as the first group needs.
    num_groups = max(1, num_microbatches // least)
    size, larger = divmod(num_microbatches, num_groups)
    starts = [i * size + min(i, larger) for i in range(num_groups + 1)]
    return [range(start, end) for start, end in itertools.pairwise(starts)]


def _alternate(forwards: list[Action], backwards: list[Action], warmup: int) -> list[Action]:
    """`warmup` forwards, then forward and backward in turn, then the backwards that are left."""
    row = forwards[:warmup]
    steady = forwards[warmup:]
    for forward, backward in zip(steady, backwards, strict=False):
        row += [forward, backward]
    return row + backwards[len(steady) :]


def _schedule(
    name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int, rows: list[list[Action]]
) -> Schedule:
    """Put each stage's REDUCE right behind its last backward, where the reduction can hide behind other stages."""
    complete = []
    for row in rows:
        last_backward = {action.stage: i for i, action in enumerate(row) if action.kind in (Kind.B, Kind.W)}
        complete_row: list[Action] = []
        for i, action in enumerate(row):
            complete_row.append(action)
            if last_backward.get(action.stage) == i:
                complete_row.append(Action(Kind.REDUCE, action.stage))
        complete.append(tuple(complete_row))
    return Schedule(name, num_ranks, stages_per_rank, num_microbatches, tuple(complete))
