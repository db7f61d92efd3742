"""Synchronisation of torchmetrics states: from the rank that updates a metric, and over replicas once.

A metric is updated on one pipeline rank. Before its value is computed, that rank broadcasts its state, and the sync
over processes that torchmetrics then does covers the data axes only, so no sample counts twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_hybrid.graph.step_graph import SINK
from lightning_hybrid.patching import replace
from lightning_hybrid.pipeline.results.count_batches_once_across_ranks import CountedMetrics
from lightning_hybrid.step.objects.pytree import flatten, map_leaves
from lightning_hybrid.step.tracing.torchmetrics_as_graph_nodes import find_sinks


class MetricSync:
    """Patches all metrics of a module for the duration of a run.

    Attributes:
        metrics: All metrics, by FQN.
        counted: Counts each batch once where batches run in microbatches or shares.
    """

    def __init__(
        self,
        root: nn.Module,
        pipeline: dist.ProcessGroup,
        data: dist.ProcessGroup,
        shares: dist.ProcessGroup,
        share_rank: int = 0,
        meet: Callable[[str], None] = lambda what: None,
        launcher_world: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """Patch the metrics.

        Args:
            root: The user's module.
            pipeline: Ranks of one pipeline.
            data: Ranks with different batches.
            shares: These and the ranks with different shares of a batch.
            share_rank: Index of this rank among those that share one batch.
            meet: Called before a state is broadcast for a copy of a metric; detects ranks that run other operations.
            launcher_world: Entered around gathers, which may come from hooks of the user.
        """
        self._meet = meet
        self._pipeline = pipeline
        self._data, self._shares = data, shares
        self._feeding_rank: dict[str, int] = {}
        self._inside_step = False
        self._undo: list[Callable[[], None]] = []
        self.metrics = {name: module for name, module in root.named_modules() if isinstance(module, Metric)}
        for name, metric in self.metrics.items():
            self._install(name, metric, launcher_world)
        self.counted = CountedMetrics(find_sinks(root), share_rank)

    def _install(self, name: str, metric: Metric, launcher_world: Callable[[], AbstractContextManager[None]]) -> None:
        user_compute = metric.compute

        def gather(tensor: Tensor, group: Any = None) -> list[Tensor]:
            """The states of all ranks, each of the shape that it has there."""
            default = self._shares if self.counted.is_fed_in_shares(metric) else self._data
            with launcher_world():  # torchmetrics asks for its rank in a group, which counts from the world's
                return gather_all_tensors(tensor, group or default)

        def compute(*args: Any, **kwargs: Any) -> Any:
            if not self._inside_step and metric._computed is None:
                self._share_state(name, metric)
            return user_compute(*args, **kwargs)

        user_state = metric.__getstate__

        def state() -> Any:
            if not self._inside_step and self._is_sent(name):
                with torch._C.DisableTorchFunction():
                    self._meet(f"a copy or pickle of the metric {name!r}")
                    self._share_state(name, metric)
            return user_state()

        self._undo.append(replace(metric, "__getstate__", state, reason="pickles hold the user's state"))
        if metric.dist_sync_fn is None:
            self._undo.append(replace(metric, "dist_sync_fn", gather, reason="syncs over replicas"))
        self._undo.append(replace(metric, "compute", compute, reason="syncs over stages and replicas"))

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Run a step inside: metrics are nodes of its graph, and values of the step before are cleared."""
        for metric in self.metrics.values():
            metric._forward_cache = None
        self._inside_step = True
        try:
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

    def broadcast_all_states(self) -> None:
        """Broadcast the states of all metrics from the ranks that update them; collective over the pipeline."""
        for name, metric in self.metrics.items():
            if name in self._feeding_rank:
                self._share_state(name, metric)
                metric._computed = None

    def _is_sent(self, name: str) -> bool:
        return name in self._feeding_rank and self._pipeline.size() > 1

    def _share_state(self, name: str, metric: Metric) -> None:
        if not self._is_sent(name):
            return
        source = self._feeding_rank[name]
        # A tensor that was pickled on one device of the node would be unpickled on that device by every rank.
        names = (*metric._defaults, *_plain_attributes(metric))
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
        self.counted.close()
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()


def _plain_attributes(metric: Metric) -> list[str]:
    """Names of the plain attributes in which a metric may count beside its states."""
    return [
        name
        for name, value in vars(metric).items()
        if not name.startswith("_") and name not in metric._defaults and all(map(_is_plain, flatten(value)[0]))
    ]


def _is_plain(leaf: Any) -> bool:
    return type(leaf) is Tensor or leaf is None or isinstance(leaf, bool | int | float | str)


def _on(device: torch.device | str, leaf: Any) -> Any:
    return leaf.to(device) if isinstance(leaf, Tensor) else leaf
