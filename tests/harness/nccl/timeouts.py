"""The time limits of process groups of backend gloo."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist


def other_timeouts(expected: timedelta) -> dict[str, float]:
    """The seconds of each group of several ranks but the world's that has another time limit, by name and ranks."""
    found = {}
    for group in dist.distributed_c10d._world.pg_map:
        if group is dist.group.WORLD or not isinstance(group, dist.ProcessGroup) or group.size() == 1:
            continue  # the world's is made before the strategy, in tests; one rank waits for none
        limit = group._get_backend(torch.device("cpu")).options._timeout
        if limit != expected:
            found[f"{group.group_name}: {dist.get_process_group_ranks(group)}"] = limit.total_seconds()
    return found
