"""Schedules and their actions: the work of one pipeline rank, and its order.

A schedule is data. It says nothing about messages (`program.py` derives them), about time (`simulator.py`) or about
how an action is carried out (the pipeline's executor).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple, TypeAlias


class Kind(str, Enum):
    """The kind of an action: a forward, a backward or a part of one, a reduction, or an optimizer step."""

    __hash__ = str.__hash__  # that of Enum is plain Python, and every walk over a schedule hashes each action often

    F = "F"  # forward
    B = "B"  # full backward: gradients of inputs and of weights
    I = "I"  # noqa: E741  backward of the inputs only; torch's letter
    W = "W"  # backward of the weights only, some time after I
    REDUCE = "R"  # reduce the gradients of a stage over the data axes, once per step
    OPTIMIZER = "S"  # clip gradients and step the optimizer, once per step; measured only, in no schedule


# A reduction or an optimizer step belongs to the step, not to a microbatch.
NO_MICROBATCH = -1


class Action(NamedTuple):
    """One piece of work: `kind` on `stage` for `microbatch` (`NO_MICROBATCH` for REDUCE and OPTIMIZER).

    Written as torch writes it: `2F0` is the forward of microbatch 0 on stage 2; `2R` reduces the gradients of stage 2.
    `S` is the optimizer's step, of all stages of a rank.
    """

    kind: Kind
    stage: int
    microbatch: int = NO_MICROBATCH

    def __str__(self) -> str:
        """The short form, such as `2F0`."""
        if self.kind is Kind.OPTIMIZER:
            return self.kind.value
        if self.microbatch == NO_MICROBATCH:
            return f"{self.stage}{self.kind.value}"
        return f"{self.stage}{self.kind.value}{self.microbatch}"


# Which rank holds a stage. "round_robin": stage s is on rank s % p. "v", for two stages per rank: the first p stages go
# to the ranks in turn and the others back, so rank r holds stages r and 2p - 1 - r, and rank 0 the first and the last.
Placement: TypeAlias = Literal["round_robin", "v"]


def rank_of_stage(stage: int, num_ranks: int, placement: Placement = "round_robin") -> int:
    """The rank that holds a stage."""
    turn, rank = divmod(stage, num_ranks)
    return num_ranks - 1 - rank if placement == "v" and turn % 2 else rank


def stages_of_rank(
    rank: int, num_ranks: int, stages_per_rank: int, placement: Placement = "round_robin"
) -> tuple[int, ...]:
    """The stages that a rank holds, in ascending order."""
    stages = range(num_ranks * stages_per_rank)
    return tuple(stage for stage in stages if rank_of_stage(stage, num_ranks, placement) == rank)


@dataclass(frozen=True)
class Schedule:
    """For every pipeline rank, its actions in order.

    Ranks here are pipeline coordinates, not global ranks. `placement` tells which rank holds a stage.
    """

    name: str
    num_ranks: int
    stages_per_rank: int
    num_microbatches: int
    actions: tuple[tuple[Action, ...], ...]
    placement: Placement = "round_robin"

    @property
    def num_stages(self) -> int:
        """The number of stages over all ranks."""
        return self.num_ranks * self.stages_per_rank

    @property
    def has_backward(self) -> bool:
        """Whether any stage runs backward; False for validation and prediction."""
        return any(action.kind is not Kind.F for row in self.actions for action in row)

    def rank_of(self, stage: int) -> int:
        """The rank that holds a stage."""
        return rank_of_stage(stage, self.num_ranks, self.placement)


def with_reductions(row: list[Action]) -> tuple[Action, ...]:
    """A row with the REDUCE of each stage behind its last backward, where it can hide behind other stages.

    Later stages reduce first, whatever the number of microbatches: replicas that have different numbers meet in one
    order of collectives.
    """
    last_backward = {action.stage: i for i, action in enumerate(row) if action.kind in (Kind.B, Kind.W)}
    due: dict[int, list[int]] = {}
    latest = -1
    for stage in sorted(last_backward, reverse=True):
        latest = max(latest, last_backward[stage])
        due.setdefault(latest, []).append(stage)
    complete: list[Action] = []
    for i, action in enumerate(row):
        complete.append(action)
        complete += [Action(Kind.REDUCE, stage) for stage in due.get(i, ())]
    return tuple(complete)


def check_sizes(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> None:
    """Refuse sizes that no schedule has.

    Raises:
        ValueError: a size is below 1.
    """
    sizes = {"num_ranks": num_ranks, "num_microbatches": num_microbatches, "stages_per_rank": stages_per_rank}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"a schedule needs {name} >= 1 but got {name}={size}")
