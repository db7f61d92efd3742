"""Lines on a phase of a start that takes long: what it is, how long so far, and how long it took."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar

from lightning.pytorch.utilities.rank_zero import rank_zero_info

_SILENT_SECONDS = 3.0
_listener: ContextVar[Callable[[str], None] | None] = ContextVar("listener of phases", default=None)


class Phase:
    """A phase that has begun; it may tell which piece of its work is next."""

    def __init__(self, name: str, listener: Callable[[str], None] = lambda _: None) -> None:
        self._name, self._listener = name, listener
        self.text = name
        listener(name)

    def at(self, piece: str) -> None:
        """Name the piece that begins."""
        self.text = f"{self._name}: {piece}"
        self._listener(self.text)


@contextlib.contextmanager
def phase(what: str) -> Iterator[Phase]:
    """Context of a phase; the first rank prints its name after 3, 6, 12, ... seconds, and its time at the end."""
    if (listener := _listener.get()) is not None:
        yield Phase(what, listener)
        return
    start, is_over, is_printed, begun = time.monotonic(), threading.Event(), threading.Event(), Phase(what)

    def print_lines() -> None:
        seconds = _SILENT_SECONDS
        while not is_over.wait(start + seconds - time.monotonic()):
            is_printed.set()
            rank_zero_info(f"{begun.text}: {seconds:g} s so far")
            seconds *= 2

    thread = threading.Thread(target=print_lines, name="announce-long-phase", daemon=True)
    thread.start()
    try:
        yield begun
    finally:
        is_over.set()
        thread.join()
        if is_printed.is_set():
            rank_zero_info(f"{what}: ended after {time.monotonic() - start:.1f} s")


@contextlib.contextmanager
def phases_reported_to(listener: Callable[[str], None] | None) -> Iterator[None]:
    """Context in which a function receives the name of each phase as it begins, and none is printed."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
