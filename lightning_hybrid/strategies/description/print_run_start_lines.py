"""The lines that the first rank prints when a run starts, and a file with all of them where they are many."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_hybrid.soft_failures import only_informs
from lightning_hybrid.strategies.description.describe_batch_and_environment import (
    describe_environment,
    describe_offload_on_cpu,
)
from lightning_hybrid.strategies.description.run_start_table import StartTable, describe_run
from lightning_hybrid.strategies.run.run_and_optimization_dataclasses import Run

if TYPE_CHECKING:
    from lightning_hybrid.strategies.run.partition_module_over_ranks import ModulePartition

FILE_NAME = "hybrid3d_layout.txt"


@only_informs("the start table")
def announce_run(run: Run, partition: ModulePartition | None, *, with_environment: bool) -> None:
    """Print what a run does under its layout; on the first rank only, without any communication.

    Args:
        run: With optimizers, if it trains.
        partition: The decisions on it; None where no runner is needed.
        with_environment: Whether to print the ranks, the precision and the versions, which no layout changes.
    """
    setting = run.setting
    if setting.world.mesh.rank:
        return
    table = describe_run(run, partition, setting.trainer.optimizers if setting.is_fitting else [])
    table = dataclasses.replace(table, rest=[*table.rest, *describe_offload_on_cpu(setting)])
    if with_environment:
        table = dataclasses.replace(table, layout=[*table.layout, *describe_environment(setting)])
    path = _write(table, setting.trainer) if table.is_long else None
    rank_zero_info(str(table) if path is None else table.summary(str(path)))


@only_informs(f"the file {FILE_NAME}")
def _write(table: StartTable, trainer: Any) -> Path | None:
    """Write all lines to the folder of the logs; return the path, or None where it cannot be written."""
    logger: Any = trainer.logger
    folder = getattr(logger, "log_dir", None)
    if folder:
        _ = logger.experiment  # makes the folder; it would warn of a file that is there before it
    folder = folder or getattr(logger, "save_dir", None) or trainer.default_root_dir
    if "://" in str(folder):
        return None
    path = Path(folder) / FILE_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{table}\n", encoding="utf-8")
    return path
