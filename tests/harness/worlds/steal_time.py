"""A clock for time limits on shared machines, which excludes CPU steal time."""

from __future__ import annotations

import os
import time
from pathlib import Path

_STOLEN = 8  # column of /proc/stat's first line: clock ticks of all cores in which the host ran others (proc(5))


def seconds_without_steal(stat: Path = Path("/proc/stat")) -> float:
    """Monotonic seconds, without those that the host stole from all cores."""
    now = time.monotonic()
    try:
        ticks = int(stat.read_text().split(maxsplit=_STOLEN + 1)[_STOLEN])
    except (OSError, IndexError, ValueError):  # not Linux
        return now
    return now - ticks / os.sysconf("SC_CLK_TCK") / (os.cpu_count() or 1)
