"""torchmetrics values for a whole batch, of which ``forward`` sees one microbatch after the other.

A copy of the metric with empty states sees each microbatch too; its value in the end is that of the batch.
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
from lightning_hybrid.step.tracing.metric_nodes import copy_alone


@dataclass
class _Copy:
    """Of one metric, for one of its calls in a step.

    Attributes:
        of: The metric.
        copy: What sees the microbatches.
        count: How many it has seen; none after an error.
    """

    of: Metric | MetricCollection
    copy: Metric | MetricCollection
    count: int = 0


class BatchMetrics:
    """Those of one module; the copies serve all its steps."""

    def __init__(self, sinks: Mapping[str, nn.Module], prepare: Callable[[nn.Module], None]) -> None:
        """Args: sinks: the outermost metrics, by FQN. prepare: called with each copy of one."""
        self._sinks, self._prepare = sinks, prepare
        self._copies: dict[tuple[str, int], _Copy] = {}
        self._num_microbatches = 0

    def begin(self, num_microbatches: int) -> None:
        """A step begins, or has ended, where there are none."""
        self._num_microbatches = num_microbatches
        for known in self._copies.values():
            known.copy.reset()
            known.count = 0

    def note(self, node: Node, args: Any, kwargs: Any) -> None:
        """A metric was called on a microbatch."""
        if not node.name.startswith(SINK) or not node.name.endswith(".forward"):
            return
        fqn = node.name.removeprefix(SINK).removesuffix(".forward")
        key = fqn, node.index
        if key not in self._copies:
            sink = self._sinks[fqn]
            if not _is_plain(sink):
                return
            copy: Any = copy_alone(sink)
            copy.reset()
            self._prepare(copy)
            self._copies[key] = _Copy(sink, copy)  # type: ignore[arg-type]
        known = self._copies[key]
        args, kwargs = map_leaves(_detached, (args, kwargs))
        with torch.no_grad():
            known.copy.update(*args, **kwargs)
        known.count += 1

    def result(self, node: Node) -> list[Any] | None:
        """The leaves of what the call of a metric gives for the whole batch; None if that is not known."""
        fqn = node.name.removeprefix(SINK).removesuffix(".forward")
        known = self._copies.get((fqn, node.index))
        if known is None or known.count != self._num_microbatches:
            return None
        with torch.no_grad():
            return flatten(known.copy.compute())[0]

    def value_of(self, metric: Metric) -> Tensor | None:
        """The value of a metric that was called once in the step, for the whole batch; None if that is not known."""
        found = [
            known
            for known in self._copies.values()
            if known.count and any(module is metric for module in known.of.modules())
        ]
        if len(found) != 1 or found[0].count != self._num_microbatches:
            return None
        with torch.no_grad():
            found[0].copy.compute()  # metrics of a collection share their states only after it
            for own, copied in zip(found[0].of.modules(), found[0].copy.modules(), strict=True):
                if own is metric:
                    value = copied.compute()  # type: ignore[operator]
                    return value if isinstance(value, Tensor) and value.numel() == 1 else None
        return None


def _is_plain(sink: nn.Module) -> bool:
    """Whether what ``forward`` returns is the value of what it was given, and of no other replica's."""
    metrics = [module for module in sink.modules() if isinstance(module, Metric)]
    return all(type(metric).forward is Metric.forward and not metric.dist_sync_on_step for metric in metrics)


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
