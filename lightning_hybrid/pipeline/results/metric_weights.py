"""Metric states that count each batch once, in microbatches, in data shares, or on every rank.

A metric that a step has fed with a share of each batch is the sum over the ranks of its shares. A batch that each of
these ranks runs whole is then counted by the first of them alone; and what they all had counted before is the first
one's. A mean of numbers, of which a step gives one per batch, weighs those of microbatches and shares by their part of
the batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric

from lightning_hybrid.patching import replace


class CountedMetrics:
    """The metrics of one module."""

    def __init__(self, sinks: Mapping[str, nn.Module], share_rank: int = 0) -> None:
        """Count from now on.

        Args:
            sinks: The outermost metrics and collections, by FQN.
            share_rank: This rank among those that run shares of one batch.
        """
        self._share_rank = share_rank
        self._weight: float | None = None
        self._are_shares = self._is_called = False
        self._in_shares: set[int] = set()  # ids of metrics that were given shares of batches
        self._undo: list[Callable[[], None]] = []
        for sink in sinks.values():
            self.weigh_means(sink)
            self._undo += [
                replace(sink, "update", self._counted(sink, sink.update, keeps=False)),  # type: ignore[arg-type]
                replace(sink, "forward", self._counted(sink, sink.forward, keeps=True)),
            ]

    def is_in_shares(self, metric: Metric) -> bool:
        """Whether a metric was given shares of batches, which other ranks have the rest of."""
        return id(metric) in self._in_shares

    @contextlib.contextmanager
    def microbatch(self, weight: float | None) -> Iterator[None]:
        """A step runs inside on a part of its batch, of this weight; None for all of it."""
        before, self._weight = self._weight, None if weight == 1.0 else weight
        try:
            yield
        finally:
            self._weight = before

    @contextlib.contextmanager
    def batch(self, *, are_shares: bool) -> Iterator[None]:
        """A step runs inside on a share of a batch, or on all of it as on the other ranks."""
        self._are_shares = are_shares
        try:
            yield
        finally:
            self._are_shares = False

    def weigh_means(self, sink: nn.Module) -> None:
        """Let means of numbers in a metric, or in a copy of one, weigh microbatches."""
        for metric in sink.modules():
            if isinstance(metric, MeanMetric) and type(metric).update is MeanMetric.update:
                self._undo.append(replace(metric, "update", self._weighed(metric.update)))

    def _weighed(self, update: Callable[..., Any]) -> Callable[..., Any]:
        def weighed(value: Any, weight: Any = None, *args: Any, **kwargs: Any) -> Any:
            # A weight of the user's, such as the number of samples, is that of this part already.
            if self._weight is not None and weight is None and torch.as_tensor(value).dim() == 0:
                weight = self._weight
            given = () if weight is None else (weight,)
            return update(value, *given, *args, **kwargs)

        return weighed

    def _counted(self, sink: nn.Module, method: Callable[..., Any], *, keeps: bool) -> Callable[..., Any]:
        """A method that adds to a metric; ``keeps`` says whether it returns something."""

        def count(*args: Any, **kwargs: Any) -> Any:
            if self._is_called:  # by another method of this or another metric
                return method(*args, **kwargs)
            self._is_called = True
            try:
                metrics = [module for module in sink.modules() if isinstance(module, Metric)]
                is_known = id(metrics[0]) in self._in_shares if metrics else False
                if self._are_shares and not is_known:
                    self._in_shares.update(map(id, metrics))
                    if self._share_rank:
                        _put(metrics, [metric._defaults for metric in metrics])
                if self._are_shares or not is_known or not self._share_rank:
                    return method(*args, **kwargs)
                states = [{name: _copied(getattr(metric, name)) for name in metric._defaults} for metric in metrics]
                result = method(*args, **kwargs)
                _put(metrics, states)
                return result if keeps else None
            finally:
                self._is_called = False

        return count

    def close(self) -> None:
        """Leave the metrics as they were."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()


def _copied(state: Any) -> Any:
    return list(state) if isinstance(state, list) else state.clone()


def _put(metrics: list[Metric], states: list[Any]) -> None:
    """Give metrics states; how often they were updated stays."""
    for metric, known in zip(metrics, states, strict=True):
        for name, state in known.items():
            value = [*state] if isinstance(state, list) else state.detach().clone()
            setattr(metric, name, value.to(metric.device) if isinstance(value, Tensor) else value)
        metric._computed = None
