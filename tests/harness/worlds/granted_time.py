"""A clock for time limits on shared machines, which stands still as far as the host runs others instead."""

from __future__ import annotations

import os
import time
from pathlib import Path

_STOLEN = 8  # column of /proc/stat's first line: clock ticks of all cores in which the host ran others (proc(5))


def granted_seconds(stat: Path = Path("/proc/stat")) -> float:
    """Seconds since some moment, of which those are left out that the host took from all of our cores."""
    now = time.monotonic()
    try:
        ticks = int(stat.read_text().split(maxsplit=_STOLEN + 1)[_STOLEN])
    except (OSError, IndexError, ValueError):  # not Linux
        return now
    return now - ticks / os.sysconf("SC_CLK_TCK") / (os.cpu_count() or 1)
