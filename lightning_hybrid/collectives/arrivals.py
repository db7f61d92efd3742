"""Arrivals of the ranks of a group at a collective, counted in the store by which they met.

Code of the user may raise on one rank while the others wait for it in a collective of the same code. That rank must not
go on to the next collective, which they will not join: it first looks whether they arrive there.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch.distributed as dist

_LONGEST_PAUSE_SECONDS = 0.05
_KEY = "lightning_hybrid/arrivals"


def wait_until(is_done: Callable[[], bool], seconds: float, is_over: Callable[[], bool] = lambda: False) -> bool:
    """Ask again and again, after longer pauses, whether something in a store is done; False if time or it is over."""
    end, pause = time.monotonic() + seconds, 0.001
    while not is_done():
        if time.monotonic() > end or is_over():
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
    return True


def store_of_run(name: str, rank: int) -> dist.Store:
    """Return a part of the store by which the ranks met, empty at first.

    Each rank counts its calls with this name, so that its number is the same on all of them.
    """
    store = dist.distributed_c10d._get_default_store()
    return dist.PrefixStore(f"hybrid3d/{name}-{store.add(f'hybrid3d/{name}-of-rank-{rank}', 1)}", store)


def arrive(group: dist.ProcessGroup) -> int:
    """Count this rank; returns how many have arrived so far, in all rounds."""
    return int(_store(group).add(_KEY, 1))


def all_arrive(group: dist.ProcessGroup, arrived: int, seconds: float) -> bool:
    """Wait until all ranks have arrived in the round in which this one has; False if they do not within the time.

    No rank arrives twice before all have arrived once.
    """
    wanted = -(-arrived // group.size()) * group.size()
    return wait_until(lambda: _store(group).add(_KEY, 0) >= wanted, seconds)


def _store(group: dist.ProcessGroup) -> dist.Store:
    """The store of the group itself: the default store belongs to the world that the user's code sees."""
    return dist.distributed_c10d._get_process_group_store(group)
