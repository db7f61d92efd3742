"""Gathers of torchmetrics states: over the ranks with different batches, and only where all of them gather the same.

torchmetrics gathers a list tensor by tensor. Ranks that have updated it differently often would wait for each other, or
take one tensor for another.

After a run the ranks of a replica hold one state, which counts once until the metric is reset.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable
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

        if syncs and (dist_sync_fn is None or isinstance(dist_sync_fn, GatherAfterRun)):
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


class CountOfRun(int):
    """The number of updates of a metric since a run; ``reset`` makes it a plain 0, and pickles have a plain int."""

    def __add__(self, other: int) -> CountOfRun:
        """Count more updates."""
        return CountOfRun(int(self) + other)

    def __deepcopy__(self, memo: Any) -> CountOfRun:
        """Stay what it is: the copy has the same updates."""
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a plain int."""
        return int, (int(self),)


class GatherAfterRun:
    """The ``dist_sync_fn`` of a metric after a run, and of its deep copies; pickles of these have None instead."""

    def __init__(self, metric: Metric, replicas: dist.ProcessGroup) -> None:
        self._metric, self._replicas = weakref.ref(metric), replicas

    def __call__(self, tensor: Tensor, group: Any = None) -> list[Tensor]:
        """Gather a state over replicas; over all ranks, once the metric has been reset."""
        is_of_run = isinstance(getattr(self._metric(), "_update_count", None), CountOfRun)
        return gather_all_tensors(tensor, group or (self._replicas if is_of_run else None))

    def __deepcopy__(self, memo: dict[int, Any]) -> GatherAfterRun:
        """Copy for the copy of the metric."""
        metric: Any = self._metric()
        return GatherAfterRun(memo.get(id(metric), metric), self._replicas)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle None."""
        return operator.itemgetter(0), ((None,),)


def count_replicas_once(owners: Iterable[Any], replicas: dist.ProcessGroup) -> None:
    """Let metrics that a run has updated count each replica once after it; collective over replicas.

    Args:
        owners: The user's module and callbacks, with metrics in their attributes.
        replicas: The ranks with different batches.
    """
    metrics = _metrics_of(owners)
    rows: list[list[int]] = [[]] * replicas.size()
    dist.all_gather_object(rows, [int(metric._update_count) for metric in metrics], group=replicas)
    for index, metric in enumerate(metrics):
        # A replica may have updated it in none of its batches, and must gather with the others.
        if metric.dist_sync_fn is None and any(row[index] for row in rows if index < len(row)):
            metric.dist_sync_fn = GatherAfterRun(metric, replicas)
        if isinstance(metric.dist_sync_fn, GatherAfterRun):
            metric._update_count = CountOfRun(metric._update_count)


def _metrics_of(owners: Iterable[Any]) -> list[Metric]:
    """Metrics in attributes of the owners, and in lists and dicts there, in a fixed order."""
    values = [value for owner in owners for value in vars(owner).values()]
    for value in tuple(values):
        values += value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    modules = [inner for value in values if isinstance(value, nn.Module) for inner in value.modules()]
    return list({id(module): module for module in modules if isinstance(module, Metric)}.values())


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
