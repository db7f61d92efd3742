"""Schedules and their actions: the work of one pipeline rank, and its order.

A schedule is data. It says nothing about messages (`program.py` derives them), about time (`simulator.py`) or about
how an action is carried out (the pipeline's executor).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


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


@dataclass(frozen=True)
class Schedule:
    """For every pipeline rank, its actions in order.

    Stages go to the ranks in turn: with 2 ranks and 2 stages per rank, rank 0 has stages 0 and 2.
    Ranks here are pipeline coordinates, not global ranks.
    """

    name: str
    num_ranks: int
    stages_per_rank: int
    num_microbatches: int
    actions: tuple[tuple[Action, ...], ...]

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
        return stage % self.num_ranks
