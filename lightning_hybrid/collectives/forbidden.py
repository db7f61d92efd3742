"""Patch of ``dist.ProcessGroup``: collectives raise an error where other ranks do not take part, instead of hanging."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import torch.distributed as dist

from lightning_hybrid.patching import around
from lightning_hybrid.step.objects.names import names

COLLECTIVES = names(
    "allreduce allreduce_coalesced allgather _allgather_base allgather_coalesced allgather_into_tensor_coalesced"
    " broadcast barrier monitored_barrier reduce reduce_scatter _reduce_scatter_base"
    " reduce_scatter_tensor_coalesced alltoall alltoall_base gather scatter send recv recv_anysource"
    " all_gather_single all_gather_single_coalesced all_to_all_single reduce_scatter_single"
    " reduce_scatter_single_coalesced"
)
POINT_TO_POINT = ("send", "recv", "recv_anysource")


@contextlib.contextmanager
def collectives_forbidden(
    error: Callable[[str], Exception | None], groups: Collection[dist.ProcessGroup] | None = None
) -> Iterator[None]:
    """Refuses collectives inside the context, of these groups or all of several ranks, where there is an ``error``.

    Raises:
        Exception: The result of ``error``, at the call.
    """
    names = None if groups is None else {group.group_name for group in groups}

    def call(name: str, original: Callable[..., Any], group: Any, *args: Any, **kwargs: Any) -> Any:
        if group.size() > 1 and (names is None or group.group_name in names):
            refusal = error(name)
            if refusal is not None:
                raise refusal
        return original(group, *args, **kwargs)

    with contextlib.ExitStack() as undo:
        for name in COLLECTIVES:
            if name in vars(dist.ProcessGroup):
                undo.callback(around(dist.ProcessGroup, name, partial(call, name), reason="others do not take part"))
        yield
