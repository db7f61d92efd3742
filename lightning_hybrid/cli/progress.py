"""Progress of long work on standard error: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import importlib
import sys
import threading
import time
from typing import Any


class Progress:
    """A function that is told what is done next; a context, which ends the bar.

    Args:
        name: What is done, in one word.
        interval: Least seconds between two lines where there is no terminal; the first and the last are always printed.
    """

    def __init__(self, name: str, *, interval: float = 0.0) -> None:
        self._name, self._interval = name, interval
        self._bar: Any = None
        self._last: float | None = None
        self._left_out = ""
        self._start = time.monotonic()
        self._piece: tuple[str, int, int] = "", 0, 1
        self._has_phases = False
        self._is_over = threading.Event()

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` pieces are done, and what the next one is."""
        if not sys.stderr.isatty():
            now, self._left_out = time.monotonic(), f"{self._name} {done + 1} of {total}: {what}"
            if self._last is None or now - self._last >= self._interval:
                self._print(self._left_out)
                self._last, self._left_out = now, ""
            return
        self._show(what, done, total)

    def start(self, piece: str, done: int, total: int) -> None:
        """Name the piece that the next phases belong to, when ``done`` of ``total`` are done."""
        self._piece = piece, done, total

    def phase(self, what: str) -> None:
        """Show what is done now; in a line of its own, with the seconds so far, where there is no terminal."""
        self._has_phases = True
        piece, done, total = self._piece
        if sys.stderr.isatty():
            self._show(f"{piece}: {what}" if piece else what, done, total)
            return
        head = f"{self._name} {done + 1} of {total}: {piece}" if piece else self._name
        self._print(f"{head}: {what} (after {self._seconds:.1f} s)")

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._start

    def _print(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    def _show(self, what: str, done: int, total: int) -> None:
        """Set what a bar shows, whose clock goes on."""
        if self._bar is None:
            tqdm = importlib.import_module("tqdm")  # a dependency of Lightning; it has no types
            self._bar = tqdm.tqdm(total=total, desc=self._name, file=sys.stderr, leave=False)
            threading.Thread(target=self._tick, name="progress-clock", daemon=True).start()
        self._bar.total, self._bar.n = total, done
        self._bar.set_postfix_str(what, refresh=True)

    def _tick(self) -> None:
        while not self._is_over.wait(1.0):
            self._bar.refresh()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        if self._left_out:
            self._print(self._left_out)
        if self._bar is not None:
            self._bar.close()
        elif self._has_phases:
            self._print(f"{self._name}: ended after {self._seconds:.1f} s")
