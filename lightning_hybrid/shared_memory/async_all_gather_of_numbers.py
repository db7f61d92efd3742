"""Asynchronous all-gather of short rows of numbers, overlapped with other work."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.shared_memory.point_to_point_transfers import transfers_of

_TAG = 2**62  # no other message has this tag


def start_all_gather(row: Tensor, group: dist.ProcessGroup) -> Callable[[], list[Tensor]]:
    """Start to all-gather rows of equal length; collective, in one order on all ranks.

    Args:
        row: This rank's row, flat; must not be written until it is gathered.
        group: The process group.

    Returns:
        A function that waits and returns the flat rows, by rank.
    """
    transfers = transfers_of(group) if row.device.type == "cpu" else None
    if transfers is None:
        rows = [torch.empty_like(row) for _ in range(group.size())]
        work = dist.all_gather(rows, row, group=group, async_op=True)

        def wait() -> list[Tensor]:
            """Returns the rows, of the shape of ``row``."""
            if work is not None:
                work.wait()
            return rows

        return wait
    peers = [None if rank == group.rank() else rank for rank in range(group.size())]
    for peer in peers:
        if peer is not None:
            transfers.send(peer, _TAG, row)
    return lambda: [row if peer is None else transfers.receive(peer, _TAG, row.dtype) for peer in peers]
