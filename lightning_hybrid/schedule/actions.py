"""Schedules and their actions: the work of one pipeline rank, and its order.

A schedule is data. It says nothing about messages (`program.py` derives them), about time (`simulator.py`) or about
how an action is carried out (the pipeline's executor).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias

from lightning_hybrid.graph.partition import Assignment


class Kind(str, Enum):
    """The kind of an action: a forward, a backward or a part of one, a reduction, or an optimizer step."""

    __hash__ = str.__hash__  # that of Enum is plain Python, and every walk over a schedule hashes each action often

    F = "F"  # forward
    B = "B"  # full backward: gradients of inputs and of weights
    I = "I"  # noqa: E741  backward of the inputs only; torch's letter
    W = "W"  # backward of the weights only, some time after I
    REDUCE = "R"  # reduce the gradients of a stage over the data axes, once per step
    OPTIMIZER = "S"  # clip gradients and step the optimizer, once per step; measured only, in no schedule


# A reduction or an optimizer step belongs to the step, not to a microbatch. Where several ranks hold a stage, their
# reductions have the numbers below.
NO_MICROBATCH = -1


class Action(NamedTuple):
    """One piece of work: `kind` on `stage` for `microbatch` (below 0 for REDUCE and OPTIMIZER).

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
        if self.microbatch < 0:
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


def ranks_of_widths(widths: Sequence[int]) -> list[range]:
    """The ranks that hold each stage, where stage s has `widths[s]` of them."""
    ends = [0, *itertools.accumulate(widths)]
    return [range(first, end) for first, end in itertools.pairwise(ends)]


@dataclass(frozen=True)
class Schedule:
    """For every pipeline rank, its actions in order.

    Ranks here are pipeline coordinates, not global ranks. `placement` tells which rank holds a stage. A stage s of
    `widths[s]` ranks has copies on all of them, which take its microbatches in turn; one each if `widths` is empty.
    """

    name: str
    num_ranks: int
    stages_per_rank: int
    num_microbatches: int
    actions: tuple[tuple[Action, ...], ...]
    placement: Placement = "round_robin"
    widths: tuple[int, ...] = ()

    @property
    def num_stages(self) -> int:
        """The number of stages over all ranks."""
        return len(self.widths) or self.num_ranks * self.stages_per_rank

    @property
    def has_backward(self) -> bool:
        """Whether any stage runs backward; False for validation and prediction."""
        return any(action.kind is not Kind.F for row in self.actions for action in row)

    @cached_property
    def ranks_of_stages(self) -> Sequence[Sequence[int]]:
        """The ranks that hold each stage."""
        if self.widths:
            return ranks_of_widths(self.widths)
        return [(rank_of_stage(stage, self.num_ranks, self.placement),) for stage in range(self.num_stages)]

    def rank_of(self, stage: int, microbatch: int) -> int:
        """The rank that runs a microbatch of a stage."""
        ranks = self.ranks_of_stages[stage]
        return ranks[microbatch % len(ranks)]

    def source_of(self, message: Message) -> int:
        """The rank that makes a message."""
        return self.rank_of(message.source, message.microbatch)

    def target_of(self, message: Message) -> int:
        """The rank that needs a message."""
        return self.rank_of(message.target, message.microbatch)


def alternated(forwards: list[Action], backwards: list[Action], warmup: int) -> list[Action]:
    """`warmup` forwards, then forward and backward in turn, then the backwards that are left."""
    row = forwards[:warmup]
    steady = forwards[warmup:]
    for forward, backward in zip(steady, backwards, strict=False):
        row += [forward, backward]
    return row + backwards[len(steady) :]


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


def check_stages(name: str, stages_per_rank: int, *allowed: int) -> None:
    """Refuse a number of stages per rank that the schedule of a name does not have."""
    if stages_per_rank not in allowed:
        words = {(1,): "one stage", (2,): "two stages", (1, 2): "one or two stages"}[allowed]
        raise ValueError(
            f"schedule={name!r} runs {words} per rank, not"
            f" stages_per_rank={stages_per_rank}; set stages_per_rank={allowed[-1]} or schedule='interleaved_1f1b'"
        )


class Message(NamedTuple):
    """All values that go from stage `source` to stage `target` for one microbatch, together.

    A "forward" message carries activations to a later stage, a "backward" message their gradients to an earlier one.
    Between two stages of one rank a message still exists, but nothing is sent.
    """

    direction: Literal["forward", "backward"]
    source: int
    target: int
    microbatch: int

    def __str__(self) -> str:
        """The short form: `0>1F2` is activations from stage 0 to 1 for microbatch 2, `1>0B2` their gradients."""
        return f"{self.source}>{self.target}{self.direction[0].upper()}{self.microbatch}"


@dataclass(frozen=True)
class Portals:
    """The pairs of stages that are linked.

    Args:
        forward: pairs (src, dst), dst > src: some value made on stage src is used on stage dst.
        backward: the subset of these pairs of which some value carries a gradient back, from dst to src.

    Raises:
        ValueError: a pair does not lead to a later stage, or gradients would come back where no value went.
    """

    forward: frozenset[tuple[int, int]]
    backward: frozenset[tuple[int, int]]

    @classmethod
    def of(cls, assignment: Assignment) -> Portals:
        """Portals of a step whose operations are assigned to stages."""
        return cls(frozenset(assignment.portals), frozenset(assignment.gradient_portals()))

    def __post_init__(self) -> None:
        """Check the pairs."""
        astray = sorted(pair for pair in self.forward if not 0 <= pair[0] < pair[1])
        if astray:
            raise ValueError(f"portals lead from a stage (>= 0) to a later one, but these do not: {astray}")
        orphans = sorted(self.backward - self.forward)
        if orphans:
            raise ValueError(f"gradients come back only where a value went; add these pairs to forward: {orphans}")


def chain(num_stages: int) -> Portals:
    """Portals of a plain sequence of stages: each hands values to the next and gets gradients back."""
    links = frozenset((stage, stage + 1) for stage in range(num_stages - 1))
    return Portals(links, links)


def needed_by(action: Action, portals: Portals) -> tuple[Message, ...]:
    """The messages that must be there before an action can run, in a fixed order.

    A forward needs the values of every stage before it; a backward (B or I) needs the gradients from every stage that
    used its values. W and REDUCE need none.
    """
    stage, microbatch = action.stage, action.microbatch
    if action.kind is Kind.F:
        sources = sorted(source for source, target in portals.forward if target == stage)
        return tuple(Message("forward", source, stage, microbatch) for source in sources)
    if action.kind in (Kind.B, Kind.I):
        users = sorted(target for source, target in portals.backward if source == stage)
        return tuple(Message("backward", user, stage, microbatch) for user in users)
    return ()


def made_by(action: Action, portals: Portals) -> tuple[Message, ...]:
    """The messages that an action makes, those to the nearest stage first: it waits for them soonest."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind is Kind.F:
        users = sorted(target for source, target in portals.forward if source == stage)
        return tuple(Message("forward", stage, user, microbatch) for user in users)
    if action.kind in (Kind.B, Kind.I):
        sources = sorted((source for source, target in portals.backward if target == stage), reverse=True)
        return tuple(Message("backward", stage, source, microbatch) for source in sources)
    return ()
