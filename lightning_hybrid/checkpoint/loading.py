"""``LightningModule.load_from_checkpoint`` of distributed checkpoints, by a replacement of Lightning's file reader.

Nothing here imports torch before a folder is read.
"""

from __future__ import annotations

import functools
from pathlib import Path
from types import ModuleType
from typing import Any


def accept_folders(saving: ModuleType) -> None:
    """Make ``pl_load`` of Lightning's ``core.saving`` read folders too, for modules of any class."""
    read = saving.pl_load
    if hasattr(read, "reads_folders"):
        return

    @functools.wraps(read)
    def read_both(path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        from lightning_hybrid.checkpoint.folder import is_folder

        if not is_folder(path):
            return read(path, map_location=map_location, weights_only=weights_only)
        from lightning_hybrid.checkpoint.read import SavedFolder

        return SavedFolder(Path(path), weights_only=weights_only).checkpoint(map_location)

    read_both.reads_folders = True  # type: ignore[attr-defined]
    saving.pl_load = read_both  # type: ignore[attr-defined]
