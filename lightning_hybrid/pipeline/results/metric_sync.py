"""Synchronisation of torchmetrics states: from the rank that updates a metric, and over replicas once.

A metric is updated on one pipeline rank. Before its value is computed, that rank broadcasts its state, and the sync
over processes that torchmetrics then does covers the data axes only, so no sample counts twice.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_hybrid.graph.step_graph import SINK
from lightning_hybrid.patching import replace
from lightning_hybrid.step.batch.metrics import FullBatchMetrics
from lightning_hybrid.step.objects.modules import modules_in
from lightning_hybrid.step.objects.pytree import map_leaves
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
        """Patch the metrics.

        Args:
            root: The user's module.
            pipeline: Ranks of one pipeline.
            meet: Waits until the ranks of a group are about to make a call, and raises where some do not.
        """
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
        """Record the rank that updates each metric.

        Args:
            sinks: Stage by pseudo-parameter.
            rank_of: Returns the pipeline rank of a stage.

        Raises:
            ValueError: Different steps update one metric on different ranks.
        """
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
        states = {name: map_leaves(partial(_on, "cpu"), getattr(metric, name)) for name in names}
        box = [(states, metric._update_count)] if self._pipeline.rank() == source else [None]
        dist.broadcast_object_list(box, group=self._pipeline, group_src=source)
        assert box[0] is not None
        if self._pipeline.rank() != source:
            received, metric._update_count = box[0]
            for state, value in received.items():
                setattr(metric, state, map_leaves(partial(_on, metric.device), value))

    def close(self) -> None:
        """Undo the patches."""
        self.calls.close()
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()


def _on(device: torch.device | str, leaf: Any) -> Any:
    return leaf.to(device) if isinstance(leaf, Tensor) else leaf
