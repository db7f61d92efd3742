"""Arrivals of the ranks of a group at a collective, counted in the store by which they met.

Code of the user may raise on one rank while the others wait for it in a collective of the same code. That rank must not
go on to the next collective, which they will not join: it first looks whether they arrive there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch.distributed as dist

_LONGEST_PAUSE_SECONDS = 0.05
_KEY = "lightning_hybrid/arrivals"


def pauses() -> Iterator[None]:
    """Sleep before each next item, longer each time: for loops that poll the store."""
    seconds = 0.001
    while True:
        time.sleep(seconds)
        seconds = min(2 * seconds, _LONGEST_PAUSE_SECONDS)
        yield


def arrive(group: dist.ProcessGroup) -> int:
    """Count this rank; returns how many have arrived so far, in all rounds."""
    return int(_store(group).add(_KEY, 1))


def all_arrive(group: dist.ProcessGroup, arrived: int, seconds: float) -> bool:
    """Wait until all ranks have arrived in the round in which this one has; False if they do not within the time.

    Args:
        group: The ranks; no rank arrives twice before all have arrived once.
        arrived: What ``arrive`` returned here.
        seconds: How long to wait.
    """
    size = group.size()
    wanted, end, pause = -(-arrived // size) * size, time.monotonic() + seconds, pauses()
    while _store(group).add(_KEY, 0) < wanted:
        if time.monotonic() > end:
            return False
        next(pause)
    return True


def _store(group: dist.ProcessGroup) -> dist.Store:
    """The store of the group itself: the default one is that of the world which the user's code sees, other on each."""
    return dist.distributed_c10d._get_process_group_store(group)
