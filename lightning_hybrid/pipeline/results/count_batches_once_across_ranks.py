"""Metric states that count each batch once, in microbatches, in data shares, or on every rank.

A metric that a step has updated with shares of batches is the sum over the ranks of these shares. A batch that each of
these ranks runs in full is then counted by the first rank only, which also keeps what all had counted before. A mean of
numbers, of which a step logs one per batch, weighs those of microbatches and shares by their fraction of the batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric

from lightning_hybrid.patching import replace

_REASON = "means weighed by microbatch"


class CountedMetrics:
    """Patches the metrics of one module so that each batch counts once."""

    def __init__(self, sinks: Mapping[str, nn.Module], share_rank: int = 0) -> None:
        """Patch the metrics.

        Args:
            sinks: The outermost metrics and collections, by FQN.
            share_rank: Index of this rank among those that run shares of one batch.
        """
        self._share_rank = share_rank
        self._weight: float | None = None
        self._are_shares = self._is_called = False
        self._in_shares: set[int] = set()  # ids of metrics that were updated with shares of batches
        self._undo: list[Callable[[], None]] = []
        for sink in sinks.values():
            self.weigh_means(sink)
            self._undo += [
                replace(sink, "update", self._counted(sink, sink.update, keeps=False), reason=_REASON),  # type: ignore[arg-type]
                replace(sink, "forward", self._counted(sink, sink.forward, keeps=True), reason=_REASON),
            ]

    def is_fed_in_shares(self, metric: Metric) -> bool:
        """Whether a metric was updated with shares of batches, of which other ranks have the rest."""
        return id(metric) in self._in_shares

    @contextlib.contextmanager
    def microbatch(self, weight: float | None) -> Iterator[None]:
        """Run a step inside on a microbatch or share of this weight; None for the full batch."""
        before, self._weight = self._weight, None if weight == 1.0 else weight
        try:
            yield
        finally:
            self._weight = before

    @contextlib.contextmanager
    def batch(self, *, are_shares: bool) -> Iterator[None]:
        """Run a step inside on a share of a batch, or on the full batch as the other ranks do."""
        self._are_shares = are_shares
        try:
            yield
        finally:
            self._are_shares = False

    def weigh_means(self, sink: nn.Module) -> None:
        """Let means of numbers in a metric, or in a copy of one, weigh microbatches."""
        for metric in sink.modules():
            if isinstance(metric, MeanMetric) and type(metric).update is MeanMetric.update:
                self._undo.append(replace(metric, "update", self._weighed(metric.update), reason=_REASON))

    def _weighed(self, update: Callable[..., Any]) -> Callable[..., Any]:
        def weighed(value: Any, weight: Any = None, *args: Any, **kwargs: Any) -> Any:
            # A weight that the user passes, such as the number of samples, is that of this microbatch already.
            if self._weight is not None and weight is None and torch.as_tensor(value).dim() == 0:
                weight = self._weight
            weights = () if weight is None else (weight,)
            return update(value, *weights, *args, **kwargs)

        return weighed

    def _counted(self, sink: nn.Module, method: Callable[..., Any], *, keeps: bool) -> Callable[..., Any]:
        """Wrap a method that updates a metric; ``keeps`` is whether its return value is used."""

        def count(*args: Any, **kwargs: Any) -> Any:
            if self._is_called:  # by another method of this or another metric
                return method(*args, **kwargs)
            self._is_called = True
            try:
                metrics = [module for module in sink.modules() if isinstance(module, Metric)]
                in_shares = id(metrics[0]) in self._in_shares if metrics else False
                if self._are_shares and not in_shares:
                    self._in_shares.update(map(id, metrics))
                    if self._share_rank:
                        _put(metrics, [metric._defaults for metric in metrics])
                if self._are_shares or not in_shares or not self._share_rank:
                    return method(*args, **kwargs)
                states = [{name: _copied(getattr(metric, name)) for name in metric._defaults} for metric in metrics]
                result = method(*args, **kwargs)
                _put(metrics, states)
                return result if keeps else None
            finally:
                self._is_called = False

        return count

    def close(self) -> None:
        """Undo the patches."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()


def _copied(state: Any) -> Any:
    return list(state) if isinstance(state, list) else state.clone()


def _put(metrics: list[Metric], states: list[Any]) -> None:
    """Set the states of metrics, but not their counts of updates."""
    for metric, values in zip(metrics, states, strict=True):
        for name, state in values.items():
            value = [*state] if isinstance(state, list) else state.detach().clone()
            setattr(metric, name, value.to(metric.device) if isinstance(value, Tensor) else value)
        metric._computed = None
