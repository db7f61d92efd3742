"""Synchronisation of torchmetrics states: from the rank that updates a metric, and over replicas once.

A metric is updated on one pipeline rank. Before its value is computed, that rank broadcasts its state, and the sync
over processes that torchmetrics then does covers the data axes only, so no sample counts twice.
"""

from __future__ import annotations

import contextlib
import operator
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_hybrid.batch.metrics import FullBatchMetrics
from lightning_hybrid.errors import RanksDisagree
from lightning_hybrid.graph.step_graph import SINK
from lightning_hybrid.patching import around, replace
from lightning_hybrid.step.objects.modules import modules_in
from lightning_hybrid.step.objects.pytree import map_tensors
from lightning_hybrid.step.tracing.metrics import find_sinks, plain_attributes


class MetricSync:
    """Patches all metrics of a module for the duration of a run.

    Attributes:
        metrics: All metrics, by FQN.
        calls: Calls metrics once for the full batch, where it runs in microbatches or shares.
    """

    def __init__(
        self,
        root: nn.Module,
        pipeline: dist.ProcessGroup,
        meet: Callable[[str, dist.ProcessGroup], None] = lambda what, group: None,
    ) -> None:
        """Patch the metrics; ``meet`` waits until all ranks of a group are to make a call, and raises otherwise."""
        self._meet = meet
        self._pipeline = pipeline
        self._feeding_rank: dict[str, int] = {}
        self._stale = set[str]()  # metrics that one rank has updated since their states were broadcast
        self._inside_step = False
        self._undo: list[Callable[[], None]] = []
        self._root, self.metrics, self.calls = root, dict[str, Metric](), FullBatchMetrics()
        self._adopt()

    def _adopt(self) -> None:
        """Patch metrics that the module has got since, as a tracker of torchmetrics makes one per epoch."""
        found = {name: module for name, module in modules_in(self._root) if isinstance(module, Metric)}
        new = {name: metric for name, metric in found.items() if self.metrics.get(name) is not metric}
        if new:
            self.metrics.update(new)
            for name, metric in new.items():
                self._install(name, metric)
            self.calls.adopt(find_sinks(self._root))

    def _install(self, name: str, metric: Metric) -> None:
        user_compute = metric.compute

        def compute(*args: Any, **kwargs: Any) -> Any:
            if not self._inside_step and name in self._stale:
                self._share_states([name], f"{name}.compute()")
            return user_compute(*args, **kwargs)

        user_state = metric.__getstate__

        def state() -> Any:
            # Another thread, such as one that writes a file, saves what is here.
            is_alone = self._inside_step or threading.current_thread() is not threading.main_thread()
            if name in self._stale and not is_alone:
                with torch._C.DisableTorchFunction():
                    self._share_states([name], f"a copy or pickle of the metric {name!r}")
            return user_state()

        self._undo.append(replace(metric, "__getstate__", state, reason="pickles hold the user's state"))
        self._undo.append(replace(metric, "compute", compute, reason="syncs over stages and replicas"))

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Run a step inside: metrics are nodes of its graph, and values of the step before are cleared."""
        if self.metrics:
            self._adopt()
        for metric in self.metrics.values():
            metric._forward_cache = None
        self._inside_step = True
        try:
            self.calls.begin()
            yield
        finally:
            self._inside_step = False

    @contextlib.contextmanager
    def local_copies(self) -> Iterator[None]:
        """Copy metrics with their local states inside, as no copy reaches user code."""
        before, self._inside_step = self._inside_step, True
        try:
            yield
        finally:
            self._inside_step = before

    def finish(self, call_metrics: Callable[[FullBatchMetrics], None]) -> None:
        """Call metrics with the full batch at the end of a step that ran in microbatches or shares."""
        with self.local_copies():
            call_metrics(self.calls)

    def record_feeding_ranks(self, sinks: Mapping[str, int], rank_of: Callable[[int], int]) -> None:
        """Record the rank that updates each metric."""
        for sink, stage in sinks.items():
            outer, rank = sink.removeprefix(SINK), rank_of(stage)
            for name in self.metrics:
                if name == outer or name.startswith(outer + "."):
                    first = self._feeding_rank.setdefault(name, rank)
                    if first != rank:
                        raise ValueError(
                            f"metric {name!r} is updated on pipeline rank {first} by one step and on rank {rank} by"
                            " another; use one metric object per step, as in self.train_accuracy and self.val_accuracy"
                        )
                    if self._pipeline.size() > 1:
                        self._stale.add(name)
                        self.metrics[name]._computed = None  # also where it is not updated

    def broadcast_all_states(self) -> None:
        """Broadcast the states of all metrics from the ranks that update them; collective over the pipeline."""
        self._share_states([name for name in self.metrics if name in self._stale], "a broadcast of all metrics")

    def _share_states(self, names: Sequence[str], what: str) -> None:
        """Broadcast states for the call ``what``; raises at once where a rank of the pipeline does not make it."""
        if names:
            self._meet(what, self._pipeline)
        for name in names:
            self._share_state(name, self.metrics[name])
            self.metrics[name]._computed = None

    def _share_state(self, name: str, metric: Metric) -> None:
        self._stale.discard(name)
        source = self._feeding_rank[name]
        # A tensor that was pickled on one device of the node would be unpickled on that device by every rank.
        names = (*metric._defaults, *plain_attributes(metric))
        states = {name: map_tensors(Tensor.cpu, getattr(metric, name)) for name in names}
        box = [(states, metric._update_count)] if self._pipeline.rank() == source else [None]
        dist.broadcast_object_list(box, group=self._pipeline, group_src=source)
        assert box[0] is not None
        if self._pipeline.rank() != source:
            received, metric._update_count = box[0]
            for state, value in received.items():
                setattr(metric, state, map_tensors(operator.methodcaller("to", metric.device), value))

    def close(self) -> None:
        """Undo the patches."""
        self.calls.close()
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()


def gather_over_replicas(
    root: nn.Module,
    replicas: dist.ProcessGroup,
    meet: Callable[[str, dist.ProcessGroup], None],
    launcher_world: Callable[[], AbstractContextManager[None]],
) -> Callable[[], None]:
    """Let metrics without a function or group of the user's gather their states over replicas; returns the undo.

    All metrics do so, since copies, and those in plain lists, are no modules of ``root``. ``meet`` is as for
    ``MetricSync``; ``launcher_world`` is entered around collectives: torchmetrics asks for its rank in a group, counted
    from the world's.
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
    """Let metrics that a run has updated count each replica once after it; collective over replicas."""
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
    """Compare the lists among the states; one to concatenate may be empty on some ranks, and gets no rows there."""
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
