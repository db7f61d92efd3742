"""The folder that caches tensor plans from run to run, beside the checkpoints."""

from __future__ import annotations

import os
from typing import Any

from lightning.fabric.utilities.cloud_io import _is_local_file_protocol


def plan_folder(trainer: Any) -> str | None:
    """Return the folder of cached plans; None if this run keeps no files, or none on a disk.

    That is the checkpoint folder that the user set. Where Lightning makes one for each run, below a logger's folder
    with a version, it is the folder of all versions.
    """
    folders = [callback.dirpath for callback in trainer.checkpoint_callbacks if getattr(callback, "dirpath", None)]
    if not folders or trainer.fast_dev_run:
        return None
    folder = os.fspath(folders[0])
    if trainer.loggers:
        logger = trainer.loggers[0]
        version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
        of_all_runs = os.path.join(logger.save_dir or trainer.default_root_dir, str(logger.name))
        if os.path.normpath(folder) == os.path.normpath(os.path.join(of_all_runs, version, "checkpoints")):
            folder = of_all_runs
    return folder if _is_local_file_protocol(folder) else None
