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
_LOOK_SECONDS = 0.001
_PATIENCE_SECONDS = 1.0


@cache
def end_after_gloo() -> None:
    """Let the end of this process wait for gloo's threads; a second call changes nothing."""
    atexit.register(wait_for_gloo)


def wait_for_gloo() -> None:
    """Wait until gloo's threads have nothing to do, or a second; without /proc, for some milliseconds."""
    if not _THREADS.exists():
        time.sleep(20 * _LOOK_SECONDS)
        return
    end = time.monotonic() + _PATIENCE_SECONDS
    idle = 0
    # Once could be the moment before it gets the lock that this thread holds whenever it does not sleep.
    while idle < 2 and time.monotonic() < end:
        time.sleep(_LOOK_SECONDS)
        idle = 0 if any(map(_is_busy, _THREADS.iterdir())) else idle + 1


def _is_busy(thread: Path) -> bool:
    """Whether a thread is gloo's and runs, or would if it could."""
    try:
        # "1234 (pt_gloo_runloop) S ..."; names may contain spaces and parentheses.
        name, _, rest = (thread / "stat").read_text().partition("(")[2].rpartition(")")
    except OSError:  # it has ended
        return False
    return "gloo" in name and not rest.lstrip().startswith("S")
