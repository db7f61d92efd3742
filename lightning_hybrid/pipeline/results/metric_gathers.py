"""Gathers of torchmetrics states: over the ranks with different batches, and only where all of them gather the same.

torchmetrics gathers a list tensor by tensor. Ranks that have updated it differently often would wait for each other, or
take one tensor for another.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_hybrid.errors import RanksDisagree
from lightning_hybrid.patching import around


def gather_over_replicas(
    root: nn.Module,
    replicas: dist.ProcessGroup,
    meet: Callable[[str, dist.ProcessGroup], None],
    launcher_world: Callable[[], AbstractContextManager[None]],
) -> Callable[[], None]:
    """Let metrics without a function or group of the user's gather their states over replicas; returns the undo.

    All metrics do so, since copies, and those in plain lists, are no modules of ``root``.

    Args:
        root: The user's module, whose metrics messages name.
        replicas: The ranks with different batches.
        meet: Waits until the ranks of a group are about to make a call, and raises where some do not.
        launcher_world: Entered around collectives: torchmetrics asks for its rank in a group, counted from the world's.
    """

    def sync(
        original: Callable[..., None],
        metric: Metric,
        dist_sync_fn: Any = None,
        process_group: Any = None,
        should_sync: bool = True,
        distributed_available: Any = None,
    ) -> None:
        given = process_group or metric.process_group
        available = distributed_available or metric.distributed_available_fn
        syncs = should_sync and not metric._is_synced and callable(available) and available()

        def gather(tensor: Tensor, group: Any = None) -> list[Tensor]:
            with launcher_world():
                return gather_all_tensors(tensor, group or replicas)

        if syncs and dist_sync_fn is None:
            dist_sync_fn = gather
            if given is None and replicas.size() > 1:
                name = next((repr(fqn) for fqn, module in root.named_modules() if module is metric), "")
                with launcher_world(), torch._C.DisableTorchFunction():
                    meet(
                        f"the sum of the metric {name} ({type(metric).__name__}) over ranks, by its compute()", replicas
                    )
                    _compare(name, metric, replicas)
        original(metric, dist_sync_fn, process_group, should_sync, distributed_available)

    return around(Metric, "sync", sync, reason="ranks compare what they gather")


def _compare(name: str, metric: Metric, group: dist.ProcessGroup) -> None:
    """Compare the lists among the states; one to concatenate may be empty on some ranks, and gets no rows there.

    Raises:
        RanksDisagree: A list that is not concatenated has different lengths; on every rank.
    """
    lists = {state: getattr(metric, state) for state in metric._reductions}
    lists = {state: value for state, value in lists.items() if isinstance(value, list)}
    if not lists:
        return
    rows: list[Any] = [None] * group.size()
    kinds = {state: [(entry.dtype, entry.shape[1:]) for entry in value] for state, value in lists.items()}
    dist.all_gather_object(rows, (kinds, metric._update_count), group=group)
    for state, value in lists.items():
        counts = [len(found[state]) for found, _ in rows]
        if metric._reductions[state] is dim_zero_cat:
            if any(counts) and not value:
                dtype, shape = next(kind for found, _ in rows for kind in found[state])
                setattr(metric, state, [torch.empty((0, *shape), dtype=dtype, device=metric.device)])
        elif len(set(counts)) > 1:
            raise RanksDisagree(
                f"the metric {name} ({type(metric).__name__}) was updated {[updates for _, updates in rows]} times on"
                f" the {group.size()} ranks with different batches, and has {counts} tensors in its list {state!r}:"
                " ranks cannot gather a list of different lengths, unless it is concatenated. Pass"
                ' dist_reduce_fx="cat" to add_state, or update the metric as often on each rank',
                entry="metric-lists",
            )
