"""Process exit that waits until gloo's threads have released the tensors that they sent.

A thread of gloo that drops the last reference to a tensor needs Python's lock to free it. If the interpreter is
finalizing, Python ends the thread, C++ treats that as an error, and a correct job ends with "terminate called without
an active exception" and exit code -6. After `work.wait()`, one tensor in four is still referenced for a moment.
"""

from __future__ import annotations

import atexit
import time
from functools import cache
from pathlib import Path

_THREADS = Path("/proc/self/task")
# Longer than one sleep of a thread that waits for Python's lock.
_POLL_SECONDS = 0.015
_MAX_WAIT_SECONDS = 1.0


@cache
def end_after_gloo() -> None:
    """Register ``wait_for_gloo`` at process exit; a second call changes nothing."""
    atexit.register(wait_for_gloo)


def wait_for_gloo() -> None:
    """Wait until gloo's threads are idle, at most a second; without /proc, for some milliseconds."""
    end = time.monotonic() + _MAX_WAIT_SECONDS
    before: set[tuple[str, ...]] | None = None
    while time.monotonic() < end:
        time.sleep(_POLL_SECONDS)
        now = _workers()
        if now == before and all(state.startswith("S") for _, state, *_ in now):
            return
        before = now


def _workers() -> set[tuple[str, ...]]:
    """The threads of gloo: id, state, and numbers of voluntary and involuntary context switches."""
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
