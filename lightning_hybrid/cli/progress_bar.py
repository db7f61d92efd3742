"""Progress of long work on standard error: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import importlib
import sys
import time
from typing import Any


class Progress:
    """A function that is told what is done next; a context, which ends the bar.

    Args:
        name: What is done, in one word.
        interval: Least seconds between two lines where there is no terminal; the first is always printed.
    """

    def __init__(self, name: str, *, interval: float = 0.0) -> None:
        self._name, self._interval = name, interval
        self._bar: Any = None
        self._last: float | None = None

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` pieces are done, and what the next one is."""
        if not sys.stderr.isatty():
            now = time.monotonic()
            if self._last is None or now - self._last >= self._interval:
                self._last = now
                print(f"{self._name} {done + 1} of {total}: {what}", file=sys.stderr, flush=True)
            return
        if self._bar is None:
            tqdm = importlib.import_module("tqdm")  # a dependency of Lightning; it has no types
            self._bar = tqdm.tqdm(total=total, desc=self._name, file=sys.stderr, leave=False)
        self._bar.total, self._bar.n = total, done
        self._bar.set_postfix_str(what, refresh=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
