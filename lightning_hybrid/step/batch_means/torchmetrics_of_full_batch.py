"""torchmetrics values for the full batch, of which ``forward`` receives one microbatch after the other.

A copy of the metric with empty states receives each microbatch too; its final value is that of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_hybrid.graph.step_graph import SINK, Node
from lightning_hybrid.step.objects.pytree import flatten, map_leaves
from lightning_hybrid.step.objects.tensor_storage_and_subclasses import detached_leaf
from lightning_hybrid.step.tracing.torchmetrics_as_graph_nodes import isolated_copy


@dataclass
class _MetricCopy:
    """The copy of one metric for one of its calls in a step, and the number of microbatches that the copy has received.

    The number is less than all after an error.
    """

    of: Metric | MetricCollection
    copy: Metric | MetricCollection
    count: int = 0


class BatchMetrics:
    """Batch values of the metrics of one module; the copies are reused in all its steps."""

    def __init__(self, sinks: Mapping[str, nn.Module], prepare: Callable[[nn.Module], None]) -> None:
        """Take ``sinks`` (the outermost metrics, by FQN), ``prepare`` (called with each copy)."""
        self._sinks, self._prepare = sinks, prepare
        self._copies: dict[tuple[str, int], _MetricCopy] = {}
        self._num_microbatches = 0

    def begin(self, num_microbatches: int) -> None:
        """Reset the copies for a step of so many microbatches; 0 after its end."""
        self._num_microbatches = num_microbatches
        for each in self._copies.values():
            each.copy.reset()
            each.count = 0

    def record(self, node: Node, args: Any, kwargs: Any) -> None:
        """Update the copy of a metric that was called on a microbatch."""
        if not node.name.startswith(SINK) or not node.name.endswith(".forward"):
            return
        fqn = node.name.removeprefix(SINK).removesuffix(".forward")
        key = fqn, node.index
        if key not in self._copies:
            sink = self._sinks[fqn]
            if not _has_native_forward(sink):
                return
            copy: Any = isolated_copy(sink)
            copy.reset()
            self._prepare(copy)
            self._copies[key] = _MetricCopy(sink, copy)  # type: ignore[arg-type]
        each = self._copies[key]
        args, kwargs = map_leaves(detached_leaf, (args, kwargs))
        with torch.no_grad():
            each.copy.update(*args, **kwargs)
        each.count += 1

    def result(self, node: Node) -> list[Any] | None:
        """Leaves of the result of a metric call for the full batch; None if it is not known."""
        fqn = node.name.removeprefix(SINK).removesuffix(".forward")
        each = self._copies.get((fqn, node.index))
        if each is None or each.count != self._num_microbatches:
            return None
        with torch.no_grad():
            return flatten(each.copy.compute())[0]

    def value_of(self, metric: Metric) -> Tensor | None:
        """The value, a tensor of one element, of a metric for the full batch; None unless called once in the step.

        Values of any other shape give None too.
        """
        copies = [
            each
            for each in self._copies.values()
            if each.count and any(module is metric for module in each.of.modules())
        ]
        if len(copies) != 1 or copies[0].count != self._num_microbatches:
            return None
        with torch.no_grad():
            copies[0].copy.compute()  # metrics of a collection share their states only after it
            for original, copied in zip(copies[0].of.modules(), copies[0].copy.modules(), strict=True):
                if original is metric:
                    value = copied.compute()  # type: ignore[operator]
                    return value if isinstance(value, Tensor) and value.numel() == 1 else None
        return None


def _has_native_forward(sink: nn.Module) -> bool:
    """Whether ``forward`` is torchmetrics' own, and returns the value of its arguments without other replicas."""
    metrics = [module for module in sink.modules() if isinstance(module, Metric)]
    return all(type(metric).forward is Metric.forward and not metric.dist_sync_on_step for metric in metrics)
