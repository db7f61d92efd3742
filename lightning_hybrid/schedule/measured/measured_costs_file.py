"""The file of measured costs that a run leaves beside its checkpoints: seconds of stages and units, and the hardware.

A later plan can read it in place of predictions, or to correct them.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_hybrid.schedule.measured.lost_time_by_cause import TimeByCause
from lightning_hybrid.schedule.measured.stage_seconds import StageSeconds, UnitSeconds

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
