"""Bytes that this rank sends to other ranks, by the axis of the layout that the ranks are on.

Collectives count as in a ring: of n bytes over k ranks, a gather, a reduce-scatter, a broadcast and an all-to-all send
n (k - 1) / k bytes per rank, and an all-reduce sends twice as many.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_hybrid.layout import AXES, ParallelLayout
from lightning_hybrid.patching import around
from lightning_hybrid.shared_memory.collectives import SharedMemory
from lightning_hybrid.shared_memory.transfers import Transfers
from lightning_hybrid.soft_failures import only_informs
from lightning_hybrid.step.objects.pytree import flatten

Collective = Literal["all_reduce", "gather", "scatter", "send"]
AXIS_NAMES = ("data", "context", "tensor", "pipeline", "experts", "several")  # several: ranks along more than one axis
_NAMES = {"pp": "pipeline", "dp_replicate": "data", "dp_shard": "data", "cp": "context", "tp": "tensor"}

# By method of a process group: the collective, and the position of what this rank puts in.
_METHODS: dict[str, tuple[Collective, int]] = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "allgather": ("gather", 1),
    "_allgather_base": ("gather", 1),
    "all_gather_single": ("gather", 1),
    "allgather_into_tensor_coalesced": ("gather", 1),
    "all_gather_single_coalesced": ("gather", 1),
    "reduce_scatter": ("scatter", 1),
    "_reduce_scatter_base": ("scatter", 1),
    "reduce_scatter_single": ("scatter", 1),
    "reduce_scatter_tensor_coalesced": ("scatter", 1),
    "reduce_scatter_single_coalesced": ("scatter", 1),
    "alltoall": ("scatter", 1),
    "alltoall_base": ("scatter", 1),
    "all_to_all_single": ("scatter", 1),
    "broadcast": ("scatter", 0),
    "send": ("send", 0),
}
_IN_SHARED_MEMORY: dict[tuple[type, str], tuple[Collective, int]] = {
    (SharedMemory, "all_reduce"): ("all_reduce", 0),
    (SharedMemory, "all_gather"): ("gather", 0),
    (SharedMemory, "exchange"): ("scatter", 0),
    (Transfers, "send"): ("send", 2),
}


class SentBytes:
    """Counts the bytes that this rank sends while it is started.

    Attributes:
        counts: Bytes so far, by name of an axis (`AXIS_NAMES`).
    """

    def __init__(self, layout: ParallelLayout, joined: ProcessGroup | None = None) -> None:
        """Take the layout, and the group of the ranks over which experts are sharded, if they are."""
        self.counts = dict.fromkeys(AXIS_NAMES, 0.0)
        self._layout, self._joined = layout, joined
        self._axes: dict[int, tuple[ProcessGroup, str]] = {}  # by id of the group, which is kept
        self._patches = contextlib.ExitStack()

    def start(self) -> None:
        """Forget what was counted, and count from now on."""
        self.stop()
        self.counts = dict.fromkeys(AXIS_NAMES, 0.0)
        for name, (kind, position) in _METHODS.items():
            if hasattr(ProcessGroup, name):  # some are of newer versions of torch
                counted = partial(self._count_of_group, kind, position)
                self._patches.callback(around(ProcessGroup, name, counted, reason="counts sent bytes"))
        for (owner, name), (kind, position) in _IN_SHARED_MEMORY.items():
            counted = partial(self._count_of_streams, kind, position)
            self._patches.callback(around(owner, name, counted, reason="counts sent bytes"))

    def stop(self) -> None:
        """Count no longer."""
        self._patches.close()

    def _count_of_group(
        self, kind: Collective, position: int, original: Callable[..., Any], group: ProcessGroup, *args: Any, **kw: Any
    ) -> Any:
        if len(args) > position:
            self._add(group, kind, args[position])
        return original(group, *args, **kw)

    def _count_of_streams(
        self, kind: Collective, position: int, original: Callable[..., Any], memory: Any, *args: Any, **kw: Any
    ) -> Any:
        group = None if memory._streams.group is None else memory._streams.group()
        if group is not None:
            self._add(group, kind, args[position])
        return original(memory, *args, **kw)

    @only_informs("the count of sent bytes")
    def _add(self, group: ProcessGroup, kind: Collective, values: Any) -> None:
        size = group.size()
        if size == 1:
            return
        share = {"all_reduce": 2 * (size - 1) / size, "gather": size - 1, "scatter": (size - 1) / size, "send": 1}[kind]
        self.counts[self._axis_of(group)] += share * sum(
            value.nbytes for value in flatten(values)[0] if isinstance(value, Tensor)
        )

    def _axis_of(self, group: ProcessGroup) -> str:
        if id(group) not in self._axes:
            self._axes[id(group)] = group, self._found_axis(group)
        return self._axes[id(group)][1]

    def _found_axis(self, group: ProcessGroup) -> str:
        ranks = dist.get_process_group_ranks(group)
        if self._joined is not None and ranks == dist.get_process_group_ranks(self._joined):
            return "experts"
        places = [self._layout.coordinates(rank) for rank in ranks]
        axes = {_NAMES[axis] for axis in AXES if len({getattr(place, axis) for place in places}) > 1}
        return axes.pop() if len(axes) == 1 else "several"
