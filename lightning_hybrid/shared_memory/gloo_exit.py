"""A process ends only when gloo's threads have let go of the tensors that they sent.

A thread of gloo that is the last to hold a tensor needs Python's lock to free it. If the interpreter is ending just
then, Python ends the thread, C++ calls that an error, and a job that did everything right ends with "terminate called
without an active exception" and exit code -6. After `work.wait()`, one tensor in four is still held for a moment.
"""

from __future__ import annotations

import atexit
import time
from functools import cache
from pathlib import Path

_THREADS = Path("/proc/self/task")
# Longer than a thread that waits for Python's lock sleeps at a time.
_LOOK_SECONDS = 0.015
_PATIENCE_SECONDS = 1.0


@cache
def end_after_gloo() -> None:
    """Let the end of this process wait for gloo's threads; a second call changes nothing."""
    atexit.register(wait_for_gloo)


def wait_for_gloo() -> None:
    """Wait until gloo's threads have nothing to do, or a second; without /proc, for some milliseconds."""
    end = time.monotonic() + _PATIENCE_SECONDS
    before: set[tuple[str, ...]] | None = None
    while time.monotonic() < end:
        time.sleep(_LOOK_SECONDS)
        now = _workers()
        if now == before and all(state.startswith("S") for _, state, *_ in now):
            return
        before = now


def _workers() -> set[tuple[str, ...]]:
    """The threads that run gloo's operations: number, state, and how often each has slept and been interrupted."""
    found: set[tuple[str, ...]] = set()
    for thread in _THREADS.iterdir() if _THREADS.exists() else ():
        try:
            text = (thread / "status").read_text()
        except OSError:  # it has ended
            continue
        fields = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
        if "gloo_runloop" in fields["Name"]:
            switches = fields["voluntary_ctxt_switches"], fields["nonvoluntary_ctxt_switches"]
            found.add((thread.name, fields["State"], *switches))
    return found
