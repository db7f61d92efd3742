"""ZB-V and DualPipeV: schedules of two stages per rank, placed so that the first and the last are on rank 0.

Rank r of p holds stage r, `down` below, and stage 2p - 1 - r, `up`: the activations go down the ranks and come back, so
rank p - 1 passes them on without a message, and the rank that computes the loss is the first to run backwards.
"""

from __future__ import annotations

from collections import Counter, deque

from lightning_hybrid.schedule.actions import Action, Kind, Schedule, check_sizes, check_stages, with_reductions


def zero_bubble_v(num_ranks: int, num_microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """ZB-V (Qi et al. 2023, section 6): no bubble but the first forwards, in the memory of 1F1B.

    Where F, I and W take the same time and m >= 2p - 1, the bubble is `(p - 1) / (6 * m + p - 1)`: a sixth of 1F1B's.
    Each rank holds what p microbatches need.

    Raises:
        ValueError: a size is below 1, or a rank has another number of stages than two.
    """
    # 2 ranks, rank 0 with stages 0 and 3, rank 1 with 1 and 2
    # rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0B0 3F2 3I2 3W2 0B1 ...
    # rank 1  ... 1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 ...
    p, row_length = num_ranks, max(num_microbatches, 2 * num_ranks - 1)
    check_sizes(num_ranks, num_microbatches, stages_per_rank)
    check_stages("zero_bubble_v", stages_per_rank, 2)
    rows = []
    for r in range(p):
        row = _Row(r, 2 * p - 1 - r)
        row.add(2 * (p - r) - 1, "F down")
        row.add(r, "F up", "F down")
        row.add(p - r, "F up", "I up", "W")
        row.add(row_length - (2 * p - 1 - r), "F down", "I down", "W", "F up", "I up", "W")
        row.add(p - 1 - r, "I down", "W", "F up", "I up", "W")
        row.add(r, "I down", "I up")
        row.add(p - r, "I down", "W down")
        row.add(r, "W up")
        row.add(r, "W down")
        rows.append(row.of_microbatches(num_microbatches))
    return Schedule("zero_bubble_v", p, 2, num_microbatches, tuple(rows), "v")


def dualpipe_v(num_ranks: int, num_microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """DualPipeV: the half of DualPipe (DeepSeek-AI 2024, section 3.2.1) that needs no second copy of the parameters.

    In its middle part a rank alternates a forward and a full backward of another microbatch, whose communication can
    overlap where ranks have any; backwards are split only where others wait. Each rank holds what about p + 1
    microbatches need.

    Raises:
        ValueError: a size is below 1, or a rank has another number of stages than two.
    """
    # 2 ranks, rank 0 with stages 0 and 3, rank 1 with 1 and 2
    # rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 ...
    # rank 1  ... 1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 ...
    p, row_length = num_ranks, max(num_microbatches, 2 * num_ranks)
    check_sizes(num_ranks, num_microbatches, stages_per_rank)
    check_stages("dualpipe_v", stages_per_rank, 2)
    rows = []
    for r in range(p):
        row = _Row(r, 2 * p - 1 - r)
        row.add(2 * (p - 1 - r), "F down")
        row.add(r + 1, "F down", "F up")
        row.add(p - 1 - r, "I up", "W", "F up")
        row.add(row_length - (2 * p - 1 - r), "F down", "B up", "F up", "B down")
        row.add(p - 1 - r, "B up", "F up", "B down")
        # Half of the backwards at the end defer the gradients of weights, to be computed when ranks would wait.
        full = (r + 1) // 2
        row.add(full, "B up", "B down")
        if r % 2 == 0:
            row.add(1, "B up", "I down")
            full += 1
        row.add(r + 1 - full, "I up", "I down")
        row.add(p - 1 - r, "W", "I down")
        row.add(r + 1, "W")
        rows.append(row.of_microbatches(num_microbatches))
    return Schedule("dualpipe_v", p, 2, num_microbatches, tuple(rows), "v")


class _Row:
    """The unfinished row of a rank; every kind of action counts its microbatches in each stage."""

    def __init__(self, down: int, up: int) -> None:
        self._stages = {"down": down, "up": up}
        self._counts: Counter[tuple[str, int]] = Counter()
        self._actions: list[Action] = []
        self._deferred: deque[Action] = deque()

    def add(self, times: int, *words: str) -> None:
        """Append some actions, such as `F down`, several times; `W` is the one deferred longest."""
        for _ in range(times):
            for word in words:
                kind, _, which = word.partition(" ")
                if kind == "W":
                    self._add_weights(self._stages.get(which))
                    continue
                stage = self._stages[which]
                counted = "F" if kind == "F" else "B"
                action = Action(Kind(kind), stage, self._counts[counted, stage])
                self._counts[counted, stage] += 1
                self._actions.append(action)
                if kind == "I":
                    self._deferred.append(action._replace(kind=Kind.W))

    def _add_weights(self, stage: int | None) -> None:
        action = next(action for action in self._deferred if stage in (None, action.stage))
        self._deferred.remove(action)
        self._actions.append(action)

    def of_microbatches(self, num_microbatches: int) -> tuple[Action, ...]:
        """The actions of the first microbatches, with reductions."""
        row = [action for action in self._actions if action.microbatch < num_microbatches]
        return with_reductions(unsplit_first_stage(row))


def unsplit_first_stage(row: list[Action]) -> list[Action]:
    """A row in which stage 0 splits no backward whose parts follow each other: no rank waits for its gradients."""
    merged: list[Action] = []
    for action in row:
        before = merged[-1] if merged else None
        if action.kind is Kind.W and action.stage == 0 and before == action._replace(kind=Kind.I):
            merged[-1] = action._replace(kind=Kind.B)
        else:
            merged.append(action)
    return merged
