"""Synchronisation of torchmetrics states: from the rank that feeds a metric, and over replicas once.

A metric is fed on one pipeline rank. Before its value is computed, that rank gives its state to the others, and the
sync over processes that torchmetrics then does covers the data axes alone, so no sample counts twice.
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
from lightning_hybrid.pipeline.results.metric_weights import CountedMetrics
from lightning_hybrid.step.objects.pytree import flatten, map_leaves
from lightning_hybrid.step.tracing.metric_nodes import find_sinks


class MetricSync:
    """Installed on all metrics of a module for the time of a run."""

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
        """Install it.

        Args:
            root: The user's module.
            pipeline: Ranks of one pipeline.
            data: Ranks that see other batches.
            shares: The same with those that see other shares of a batch.
            share_rank: This rank among those that share one batch.
            meet: Called before a state is sent so that metrics can be copied; finds ranks that do something else.
            launcher_world: Entered around gathers, which hooks of the user may ask for.
        """
        self._meet = meet
        self._pipeline = pipeline
        self._data, self._shares = data, shares
        self._home: dict[str, int] = {}
        self._inside_step = False
        self._undo: list[Callable[[], None]] = []
        self.metrics = {name: module for name, module in root.named_modules() if isinstance(module, Metric)}
        for name, metric in self.metrics.items():
            self._install(name, metric, launcher_world)
        self.counted = CountedMetrics(find_sinks(root), share_rank)

    def _install(self, name: str, metric: Metric, launcher_world: Callable[[], AbstractContextManager[None]]) -> None:
        own_compute = metric.compute

        def gather(tensor: Tensor, group: Any = None) -> list[Tensor]:
            own = self._shares if self.counted.is_in_shares(metric) else self._data
            with launcher_world():  # torchmetrics asks for its rank in a group, which counts from the world's
                return gather_all_tensors(tensor, group or own)

        def compute(*args: Any, **kwargs: Any) -> Any:
            if not self._inside_step and metric._computed is None:
                self._share_state(name, metric)
            return own_compute(*args, **kwargs)

        own_state = metric.__getstate__

        def state() -> Any:
            if not self._inside_step and self._is_sent(name):
                with torch._C.DisableTorchFunction():
                    self._meet(f"a copy or pickle of the metric {name!r}")
                    self._share_state(name, metric)
            return own_state()

        self._undo.append(replace(metric, "__getstate__", state))
        if metric.dist_sync_fn is None:
            self._undo.append(replace(metric, "dist_sync_fn", gather))
        self._undo.append(replace(metric, "compute", compute))

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Inside a step metrics are nodes of its graph, and a value of the step before is not this one's."""
        for metric in self.metrics.values():
            metric._forward_cache = None
        self._inside_step = True
        try:
            yield
        finally:
            self._inside_step = False

    @contextlib.contextmanager
    def copied_alone(self) -> Iterator[None]:
        """Copies made inside are of what this rank has: none is handed to the user."""
        before, self._inside_step = self._inside_step, True
        try:
            yield
        finally:
            self._inside_step = before

    def note_homes(self, sinks: Mapping[str, int], num_ranks: int) -> None:
        """Note which rank feeds which metric.

        Args:
            sinks: Stage by pseudo-parameter.
            num_ranks: Ranks of the pipeline.

        Raises:
            ValueError: One metric is fed on different ranks by different steps.
        """
        for sink, stage in sinks.items():
            outer, rank = sink.removeprefix(SINK), stage % num_ranks
            for name in self.metrics:
                if name == outer or name.startswith(outer + "."):
                    known = self._home.setdefault(name, rank)
                    if known != rank:
                        raise ValueError(
                            f"metric {name!r} is fed on pipeline rank {known} by one step and on rank {rank} by another"
                            "; use one metric object per step, as in self.train_accuracy and self.val_accuracy"
                        )

    def share_all(self) -> None:
        """Give every rank the state of all metrics that were fed on one; collective over the pipeline."""
        for name, metric in self.metrics.items():
            if name in self._home:
                self._share_state(name, metric)
                metric._computed = None

    def _is_sent(self, name: str) -> bool:
        return name in self._home and self._pipeline.size() > 1

    def _share_state(self, name: str, metric: Metric) -> None:
        if not self._is_sent(name):
            return
        home = self._home[name]
        # A tensor that was pickled on one device of the node would come up on that device of it everywhere.
        names = (*metric._defaults, *_plain_attributes(metric))
        states = {name: map_leaves(partial(_on, "cpu"), getattr(metric, name)) for name in names}
        box = [(states, metric._update_count)] if self._pipeline.rank() == home else [None]
        dist.broadcast_object_list(box, group=self._pipeline, group_src=home)
        assert box[0] is not None
        if self._pipeline.rank() != home:
            received, metric._update_count = box[0]
            for state, value in received.items():
                setattr(metric, state, map_leaves(partial(_on, metric.device), value))

    def close(self) -> None:
        """Leave the metrics as they were."""
        self.counted.close()
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()


def _plain_attributes(metric: Metric) -> list[str]:
    """Those in which a metric may count beside its states."""
    return [
        name
        for name, value in vars(metric).items()
        if not name.startswith("_") and name not in metric._defaults and all(map(_is_plain, flatten(value)[0]))
    ]


def _is_plain(leaf: Any) -> bool:
    return type(leaf) is Tensor or leaf is None or isinstance(leaf, bool | int | float | str)


def _on(device: torch.device | str, leaf: Any) -> Any:
    return leaf.to(device) if isinstance(leaf, Tensor) else leaf
