"""Measured steps in files and loggers: JSON beside the picture, measured costs beside the checkpoints, metrics."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer

from lightning_hybrid.callbacks.lost_time.steps import MeasuredSteps
from lightning_hybrid.predict.hardware import processor_name
from lightning_hybrid.predict.layout import LAYOUT_OPTIONS
from lightning_hybrid.schedule.measured.cuts import present_cuts
from lightning_hybrid.schedule.measured.seconds import FILE_NAME, MeasuredCosts, save_measured_costs, seconds_of_units
from lightning_hybrid.version import __version__


def write_lost_time(steps: MeasuredSteps, picture: Path) -> Path:
    """Write the lost time of the steps to a JSON file beside a picture, and return its path."""
    path = picture.with_name(f"{picture.stem}_lost_time.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(steps.as_json(), indent=1), encoding="utf-8")
    return path


def write_measured_costs(
    trainer: Trainer, steps: MeasuredSteps, batch_size: int | None, **measured: Any
) -> Path | None:
    """Write the measured costs into the folder of checkpoints; return the path, or None if there is no local one.

    ``batch_size`` has the samples of a replica's batch, ``measured`` further fields of `MeasuredCosts`.
    """
    folder = getattr(trainer.checkpoint_callback, "dirpath", None)
    if folder is None or "://" in str(folder):
        return None
    path = Path(folder) / FILE_NAME
    save_measured_costs(costs_of(trainer, steps, batch_size, **measured), path)
    return path


def path_of_measured_costs(trainer: Trainer) -> Path | None:
    """Return the file of measured costs beside the checkpoints of a run that begins; None if there is none.

    Looked for are the folder of the checkpoint from which it resumes, and those of checkpoint callbacks, where these
    are known before the run.
    """
    of_run: Any = trainer
    resumed = _resumed_checkpoint(trainer)
    folders = [None if resumed is None else Path(resumed).parent]
    folders += [getattr(callback, "dirpath", None) for callback in of_run.checkpoint_callbacks]
    if of_run.checkpoint_callbacks and not of_run.loggers:
        folders.append(Path(of_run.default_root_dir) / "checkpoints")
    paths = [Path(folder) / FILE_NAME for folder in folders if folder is not None and "://" not in str(folder)]
    return next((path for path in paths if path.is_file()), None)


def _resumed_checkpoint(trainer: Any) -> Any:
    """The checkpoint that a run resumes from, which the Trainer has as an argument alone until it restores it."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_run" and frame.f_locals.get("self") is trainer:
            return frame.f_locals.get("ckpt_path")
        frame = frame.f_back
    return trainer.ckpt_path


def costs_of(trainer: Trainer, steps: MeasuredSteps, batch_size: int | None, **measured: Any) -> MeasuredCosts:
    """The costs of the measured steps of a run; arguments as for ``write_measured_costs``."""
    strategy: Any = trainer.strategy
    layout, options, device = strategy.layout, strategy.options, strategy.root_device
    count, stages, assignment = steps.typical.schedule.num_microbatches, steps.stages, steps.assignment
    is_cuda = device.type == "cuda"
    return MeasuredCosts(
        hardware={
            "device": torch.cuda.get_device_name(device) if is_cuda else processor_name(),
            "device_type": device.type,
            "num_hosts": trainer.num_nodes,
        },
        software={
            "lightning_hybrid": __version__,
            "torch": str(torch.__version__),
            "precision": str(trainer.precision),
        },
        layout={
            **layout.by_axis,
            "stages_per_rank": 1 if assignment is None else options.stages_of_each_rank,
        },
        schedule=options.schedule if assignment is not None else "",
        num_microbatches=count,
        microbatch_size=None if batch_size is None else -(-batch_size // count),
        steps=tuple(step.step for step in steps.steps),
        step=steps.typical.lost.total,
        stages=tuple(stages),
        units=() if assignment is None else tuple(seconds_of_units(assignment, stages)),
        cuts=() if assignment is None else present_cuts(assignment),
        options={
            **{name: _plain(getattr(options, name)) for name in LAYOUT_OPTIONS if hasattr(options, name)},
            "stage_widths": list(steps.typical.schedule.widths) or None,
        },
        batch_size=batch_size,
        step_times=tuple(step.lost.total for step in steps.steps),
        **measured,
    )


def _plain(value: Any) -> Any:
    """The value of an option as JSON has it."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
