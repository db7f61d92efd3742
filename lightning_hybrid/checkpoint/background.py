"""Asynchronous saves: one at a time, written in a thread of each rank while training goes on."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from torch.distributed import ProcessGroup

from lightning_hybrid.checkpoint import folder
from lightning_hybrid.errors import CheckpointError

if TYPE_CHECKING:
    from lightning_hybrid.checkpoint.write import Save


class BackgroundSave:
    """The asynchronous save of one rank."""

    _lock: ClassVar = threading.Lock()  # on the class: code that saves a strategy's arguments copies the strategy

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._path: Path | None = None
        self._error: BaseException | None = None
        self._to_remove: list[Path] = []

    @property
    def is_writing(self) -> bool:
        """Whether a save is in progress, or has ended without a call of ``wait``."""
        return self._thread is not None

    def start(self, save: Save, group: ProcessGroup | None) -> None:
        """Begin to write a save, which has copies of the tensors; ``wait`` must have been called for the one before.

        ``group`` consists of all ranks, and nothing else uses it; None for one process.
        """
        assert self._thread is None
        self._path = save.path
        # No daemon: a save in progress when the interpreter ends is completed.
        self._thread = threading.Thread(target=self._run, args=(save, group), name="checkpoint")
        self._thread.start()

    def _run(self, save: Save, group: ProcessGroup | None) -> None:
        from lightning_hybrid.checkpoint.write import write

        try:
            write(save, group, self._after_written)
        except BaseException as error:
            self._error = error

    def _after_written(self) -> None:
        with self._lock:
            for path in self._to_remove:
                folder.remove(path)
            self._to_remove, self._path = [], None

    def remove(self, path: Path) -> None:
        """Remove a checkpoint: now, or after the save in progress, which replaces it, is written.

        If that save fails, nothing is removed: this may be the last complete checkpoint.
        """
        with self._lock:
            if self._path is None:
                folder.remove(path)
            else:
                self._to_remove.append(path)

    def wait(self) -> None:
        """Wait for the save in progress; a CheckpointError if it failed."""
        if self._thread is None:
            return
        self._thread.join()
        error, not_removed = self._error, self._to_remove
        self._thread = self._path = self._error = None
        self._to_remove = []
        if error is None:
            return
        more = f"; kept in its place: {', '.join(map(str, not_removed))}" if not_removed else ""
        message = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{message}{more}", entry="save-failed") from error
