"""``LightningModule.load_from_checkpoint`` of distributed checkpoints, by a replacement of Lightning's file reader.

Nothing here imports torch before a folder is read.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from lightning_hybrid.namespace import extend


def accept_folders(saving: ModuleType) -> None:
    """Make ``pl_load`` of Lightning's ``core.saving`` read folders too, for modules of any class."""
    extend(saving, "pl_load", _read)


def _read(read: Callable[..., Any], path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
    from lightning_hybrid.checkpoint.folder import is_folder

    if not is_folder(path):
        return read(path, map_location=map_location, weights_only=weights_only)
    from lightning_hybrid.checkpoint.read import SavedFolder

    return SavedFolder(Path(path), weights_only=weights_only).checkpoint(map_location)
