"""The measured seconds of each stage per microbatch, and those of its units by their estimated costs."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_hybrid.graph.partition import Assignment, node_cost
from lightning_hybrid.schedule.schedule_and_actions import Kind
from lightning_hybrid.schedule.simulator import Timeline


@dataclass(frozen=True)
class StageSeconds:
    """The seconds of one stage for one microbatch: medians over the measured actions.

    Attributes:
        stage: Number of the stage.
        forward: Of its forward.
        backward: Of its backward; of the gradients of inputs alone where backwards are split.
        weight: Of the gradients of weights where backwards are split; 0 elsewhere.
    """

    stage: int
    forward: float
    backward: float
    weight: float = 0.0

    @property
    def total(self) -> float:
        """The seconds of all its actions."""
        return self.forward + self.backward + self.weight


@dataclass(frozen=True)
class UnitSeconds:
    """The seconds of one unit for one microbatch: its share of its stage's, by estimated cost.

    Attributes:
        name: FQN of the unit; empty for the operations of a stage outside of units.
        stage: Stage that runs it first.
        cost: Estimated cost, in FLOPs of its forward.
        forward: Of its forward.
        backward: Of its backward, gradients of weights included.
    """

    name: str
    stage: int
    cost: float
    forward: float
    backward: float


def seconds_of_stages(timelines: Iterable[Timeline], num_stages: int) -> list[StageSeconds]:
    """Return the median seconds of the actions of each stage.

    Args:
        timelines: Measured pipelines of any number of steps, ``without_waits``.
        num_stages: Stages of each.
    """
    spent: dict[tuple[Kind, int], list[float]] = {}
    for timeline in timelines:
        for span in timeline.spans:
            spent.setdefault((span.action.kind, span.action.stage), []).append(span.end - span.start)

    def median(stage: int, kinds: Sequence[Kind]) -> float:
        measured = [seconds for kind in kinds for seconds in spent.get((kind, stage), ())]
        return statistics.median(measured) if measured else 0.0

    return [
        StageSeconds(stage, median(stage, [Kind.F]), median(stage, [Kind.B, Kind.I]), median(stage, [Kind.W]))
        for stage in range(num_stages)
    ]


def seconds_of_nodes(assignment: Assignment, stages: Sequence[StageSeconds]) -> list[tuple[float, float]]:
    """Return the seconds of the forward and of the backward of each node, by its share of its stage's cost."""
    totals = assignment.costs()
    result = []
    for node, stage in zip(assignment.graph.nodes, assignment.node_stage, strict=True):
        share = node_cost(node, assignment.graph) / totals[stage] if totals[stage] else 0.0
        measured = stages[stage]
        result.append((share * measured.forward, share * (measured.backward + measured.weight)))
    return result


def seconds_of_units(assignment: Assignment, stages: Sequence[StageSeconds]) -> list[UnitSeconds]:
    """Return the seconds of each unit, in the order of the step, and of operations outside of them, by stage."""
    units: dict[tuple[str, int], list[float]] = {}
    first: dict[str, int] = {}
    for node, stage, seconds in zip(
        assignment.graph.nodes, assignment.node_stage, seconds_of_nodes(assignment, stages), strict=True
    ):
        name = node.unit or ""
        key = name, first.setdefault(name, stage) if name else stage
        sums = units.setdefault(key, [0.0, 0.0, 0.0])
        for index, value in enumerate((node_cost(node, assignment.graph), *seconds)):
            sums[index] += value
    return [UnitSeconds(name, stage, *sums) for (name, stage), sums in units.items()]


def unit_ranges(assignment: Assignment) -> list[tuple[str, str]]:
    """Return the FQNs of the first and the last unit of each stage; empty names for a stage without units."""
    found: list[list[str]] = [[] for _ in range(assignment.num_stages)]
    for node, stage in zip(assignment.graph.nodes, assignment.node_stage, strict=True):
        if node.unit is not None:
            found[stage].append(node.unit)
    return [(units[0], units[-1]) if units else ("", "") for units in found]


def describe_range(units: tuple[str, str]) -> str:
    """Return a range of units in words."""
    first, last = units
    if not first:
        return "operations outside of layers"
    return first if first == last else f"{first} to {last}"
