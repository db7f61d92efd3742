"""Saves that are written while training goes on: one at a time, in a thread of each rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from torch.distributed import ProcessGroup

from lightning_hybrid.checkpoint import checkpoint_folder as folder
from lightning_hybrid.checkpoint.checkpoint_folder import CheckpointError
from lightning_hybrid.checkpoint.writing import Save, write


class Background:
    """The save that one rank takes part in beside its training."""

    _lock: ClassVar = threading.Lock()  # of all of them: a strategy is copied by who saves its arguments

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._path: Path | None = None
        self._error: BaseException | None = None
        self._afterwards: list[Path] = []

    @property
    def is_writing(self) -> bool:
        """Whether a save is under way, or has ended and nobody has waited for it."""
        return self._thread is not None

    def start(self, save: Save, group: ProcessGroup | None) -> None:
        """Begin to write; the one before must have been waited for.

        Args:
            save: With copies of the tensors.
            group: Of all ranks, for this alone; None for one process.
        """
        assert self._thread is None
        self._path = save.path
        # No daemon: what is being written when the interpreter ends is written to the end.
        self._thread = threading.Thread(target=self._run, args=(save, group), name="checkpoint")
        self._thread.start()

    def _run(self, save: Save, group: ProcessGroup | None) -> None:
        try:
            write(save, group, self._is_there)
        except BaseException as error:
            self._error = error

    def _is_there(self) -> None:
        with self._lock:
            for path in self._afterwards:
                folder.remove(path)
            self._afterwards, self._path = [], None

    def remove(self, path: Path) -> None:
        """Remove a checkpoint, if the one that takes its place is written; otherwise as soon as it is.

        What is removed after a failed save is kept: it may be the last whole one.
        """
        with self._lock:
            if self._path is None:
                folder.remove(path)
            else:
                self._afterwards.append(path)

    def wait(self, *, complain: Callable[[str], None] | None = None) -> None:
        """Wait for the save that is under way.

        Args:
            complain: Is told what went wrong, in place of an error.

        Raises:
            CheckpointError: It could not be written.
        """
        if self._thread is None:
            return
        self._thread.join()
        error, kept = self._error, self._afterwards
        self._thread = self._path = self._error = None
        self._afterwards = []
        if error is None:
            return
        more = f"; kept in its place: {', '.join(map(str, kept))}" if kept else ""
        said = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        if complain is not None:
            complain(f"{said}{more}")
            return
        raise CheckpointError(f"{said}{more}") from error
