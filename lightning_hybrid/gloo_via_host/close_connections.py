"""Closing the connections of a gloo group, so that ranks that wait for this one get an error."""

from __future__ import annotations

import contextlib
from datetime import timedelta

import torch
from torch.distributed import ProcessGroup

_NEVER_SENT = 0x7FFFFFFE


def close_connections(group: ProcessGroup) -> None:
    """Close all connections of a group of backend gloo, on this rank."""
    # [Note: closing gloo] Neither abort nor destroy_process_group closes sockets of gloo while anything still refers to
    # the group. A receive that runs out of time does: gloo then closes all connections of the group.
    # From a peer that is gone it fails at once and closes nothing, so every peer is tried.
    for peer in range(group.size()):
        if peer != group.rank():
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1)], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))
