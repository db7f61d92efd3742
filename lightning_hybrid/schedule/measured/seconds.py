"""The measured seconds of stages and their units per microbatch, and the file that keeps them."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_hybrid.graph.partition import Assignment, node_cost
from lightning_hybrid.schedule.actions import Kind
from lightning_hybrid.schedule.measured.lost_time import TimeByCause
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
        name = node.unit
        key = name, first.setdefault(name, stage) if name else stage
        sums = units.setdefault(key, [0.0, 0.0, 0.0])
        for index, value in enumerate((node_cost(node, assignment.graph), *seconds)):
            sums[index] += value
    return [UnitSeconds(name, stage, *sums) for (name, stage), sums in units.items()]


def unit_ranges(assignment: Assignment) -> list[tuple[str, str]]:
    """Return the FQNs of the first and the last unit of each stage; empty names for a stage without units."""
    found: list[list[str]] = [[] for _ in range(assignment.num_stages)]
    for node, stage in zip(assignment.graph.nodes, assignment.node_stage, strict=True):
        if node.unit:
            found[stage].append(node.unit)
    return [(units[0], units[-1]) if units else ("", "") for units in found]


def describe_range(units: tuple[str, str]) -> str:
    """Return a range of units in words."""
    first, last = units
    if not first:
        return "operations outside of layers"
    return first if first == last else f"{first} to {last}"


FILE_NAME = "measured_costs.json"
_VERSION = 2


@dataclass(frozen=True)
class MeasuredCosts:
    """What the measured steps of a run cost.

    Attributes:
        hardware: ``device`` (its name), ``device_type``, ``num_hosts``.
        software: Versions of packages, by name, and ``precision``, as the Trainer spells it.
        layout: Ranks by axis (``pp``, ``dp_replicate``, ``dp_shard``, ``cp``, ``tp``, ``ep``), and ``stages_per_rank``.
        schedule: Its name.
        num_microbatches: Of a replica's batch.
        microbatch_size: Samples of the largest one; None if unknown.
        steps: The measured optimizer steps, counted from 1.
        step: Seconds of the measured step of median length, by cause.
        stages: Seconds per microbatch; medians over the steps. Empty without stages.
        units: The same for each unit, by its share of its stage's estimated cost.
        cuts: FQNs of the first unit of each stage but the first.
        model: ``name`` of its class; ``parameters``, their number, and ``names_checksum``, a checksum of their names;
            ``sample_elements``, the elements of the tensors of one sample. What is unknown is left out.
        options: Those of the strategy that a plan chooses, by name.
        batch_size: Samples of a replica's batch; None if unknown.
        first_step: The first optimizer step of the run, which is later than 1 if it resumed.
        step_times: Each of the measured steps by cause.
        peak_memory: Bytes of tensors on each rank at the peak of a step; empty if they were not measured.
    """

    hardware: Mapping[str, Any]
    software: Mapping[str, str]
    layout: Mapping[str, int]
    schedule: str
    num_microbatches: int
    microbatch_size: int | None
    steps: tuple[int, ...]
    step: TimeByCause
    stages: tuple[StageSeconds, ...] = ()
    units: tuple[UnitSeconds, ...] = ()
    cuts: tuple[str, ...] = field(default=())
    model: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    batch_size: int | None = None
    first_step: int = 1
    step_times: tuple[TimeByCause, ...] = ()
    peak_memory: tuple[int, ...] = ()

    @property
    def step_seconds(self) -> float:
        """The seconds of the measured step."""
        return self.step.step_seconds


def save_measured_costs(costs: MeasuredCosts, path: str | Path) -> None:
    """Write the costs to a file, which is complete or not there.

    Args:
        costs: Of a run.
        path: Of the file; its folder is created.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps({"version": _VERSION, **dataclasses.asdict(costs)}, indent=1), encoding="utf-8")
    partial.replace(path)


def load_measured_costs(path: str | Path) -> MeasuredCosts:
    """Read the costs that a run has measured.

    Args:
        path: Of the file, or of the folder of checkpoints that it is in, or of that folder's parent.

    Raises:
        FileNotFoundError: There is none.
        ValueError: It is no file of measured costs, or of another version.
    """
    path = Path(path)
    if path.is_dir():
        inner = path / "checkpoints"
        path = (path if (path / FILE_NAME).exists() or not inner.is_dir() else inner) / FILE_NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        version = content.pop("version")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no file of measured costs; PipelineTimeline writes {FILE_NAME}") from error
    if version != _VERSION:
        raise ValueError(
            f"{path} has version {version} of measured costs, and this package reads {_VERSION}; measure again"
        )
    try:
        content["step"] = TimeByCause(**content["step"])
        content["stages"] = tuple(StageSeconds(**stage) for stage in content["stages"])
        content["units"] = tuple(UnitSeconds(**unit) for unit in content["units"])
        content["step_times"] = tuple(TimeByCause(**step) for step in content["step_times"])
        for name in ("steps", "cuts", "peak_memory"):
            content[name] = tuple(content[name])
        return MeasuredCosts(**content)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is no file of measured costs; PipelineTimeline writes {FILE_NAME}") from error
