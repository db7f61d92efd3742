"""Calls of torchmetrics objects in steps that run in microbatches or shares: each is made once, with the full batch.

torchmetrics decides by the content of an update (whether values are logits, which metrics of a collection share their
states), and the value of a batch is no mean over its parts. So in a microbatch the metrics themselves are not called:
a copy returns a value to the step. The arguments of all microbatches are joined, and the metric is called with these.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import methodcaller
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_hybrid.batch.merge import (
    Argument,
    Microbatches,
    differ_in_rows,
    is_number,
    join_arguments,
    named_arguments,
)
from lightning_hybrid.patching import replace
from lightning_hybrid.step.objects.pytree import flatten, map_tensors
from lightning_hybrid.step.objects.tensors import detached_copy
from lightning_hybrid.step.standins.marks import copy_mark
from lightning_hybrid.step.tracing.metrics import isolated_copy, plain_attributes

_METHODS = ("forward", "update", "compute", "reset")
MetricCall: TypeAlias = tuple[str, Any, Any]  # method, args, kwargs
MetricCalls: TypeAlias = dict[int, dict[str, list[MetricCall]]]  # by microbatch, then by FQN of the metric


@dataclass
class _Step:
    """The calls of one step."""

    calls: MetricCalls = field(default_factory=dict)  # of this rank
    copies: set[str] = field(default_factory=set)  # the metrics whose copies this microbatch has called, by FQN
    # by id of a tensor that a copy has returned: it, the metric, the number of its call, and the leaf
    returned: dict[int, tuple[Tensor, tuple[str, int, int]]] = field(default_factory=dict)
    # leaves of the results for the full batch, by metric
    results: dict[str, list[list[Any]] | None] = field(default_factory=dict)


class FullBatchMetrics:
    """Patches the outermost metrics and collections of one module, by FQN."""

    def __init__(self, sinks: Mapping[str, nn.Module] | None = None) -> None:
        self._sinks: dict[str, nn.Module] = {}
        self._copies: dict[str, nn.Module] = {}
        self._step: _Step | None = None
        self._microbatch: int | None = None
        self._undo: list[Callable[[], None]] = []
        self._selecting: set[tuple[str, int]] = set()  # calls whose rows the content of batches selects
        self._methods: dict[tuple[str, str], Callable[..., Any]] = {}
        self.adopt(sinks or {})

    def adopt(self, sinks: Mapping[str, nn.Module]) -> None:
        """Patch the classes that are not patched yet."""
        for fqn, sink in sinks.items():
            if self._sinks.get(fqn) is sink:
                continue
            self._sinks[fqn] = sink
            self._copies.pop(fqn, None)
            for method in _METHODS:
                original = self._methods[fqn, method] = getattr(sink, method)
                call = partial(self._call, fqn, method, original)
                self._undo.append(replace(sink, method, call, reason="metrics see full batches"))

    def close(self) -> None:
        """Undo the patches."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def begin(self) -> None:
        """Begin a step; its results are kept until the next one."""
        self._step = _Step()

    @contextlib.contextmanager
    def microbatch(self, index: int, *, is_full: bool) -> Iterator[None]:
        """Run a step inside on a microbatch or share; the metrics themselves are called if it is the full batch."""
        before = self._microbatch
        self._microbatch = None if is_full else index
        if self._step is not None:
            self._step.copies.clear()
        try:
            yield
        finally:
            self._microbatch = before

    def _call(self, fqn: str, method: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        step, index = self._step, self._microbatch
        if step is None:
            return original(*args, **kwargs)
        if index is None:
            return _cloned(original(*args, **kwargs))
        before, self._microbatch = self._microbatch, None  # the copy may share what it calls with the metric
        try:
            calls = step.calls.setdefault(index, {}).setdefault(fqn, [])
            calls.append((method, *map_tensors(_detached, (args, kwargs))))
            if method == "update":
                if fqn in step.copies:
                    with torch.no_grad():
                        self._copies[fqn].update(*args, **kwargs)  # type: ignore[operator]
                return None
            copy = self._copies[fqn] if fqn in step.copies else self._filled_copy(fqn, calls[:-1])
            step.copies.add(fqn)
            try:
                result = getattr(copy, method)(*args, **kwargs)
            except Exception:  # some need several samples
                result = getattr(copy, method)(*_doubled(args), **_doubled(kwargs))
            result = _cloned(result)
            for position, leaf in enumerate(flatten(result)[0]):
                if isinstance(leaf, Tensor):
                    step.returned[id(leaf)] = leaf, (fqn, len(calls) - 1, position)
            return result
        finally:
            self._microbatch = before

    def _filled_copy(self, fqn: str, calls: Sequence[MetricCall]) -> nn.Module:
        """The copy of a metric, in its state before the step and after these calls."""
        sink = self._sinks[fqn]
        if fqn not in self._copies:
            self._copies[fqn] = isolated_copy(sink)
        copy = self._copies[fqn]
        for original, copied in zip(sink.modules(), copy.modules(), strict=True):
            if isinstance(original, Metric):
                for name in (*original._defaults, *plain_attributes(original)):
                    setattr(copied, name, map_tensors(detached_copy, getattr(original, name)))
                copied._update_count, copied._computed = original._update_count, None  # type: ignore[assignment]
            if isinstance(copied, MetricCollection):  # each by itself
                copied._groups = {i: [str(name)] for i, name in enumerate(copied.keys(keep_base=True))}
                copied._groups_checked = True
        for method, args, kwargs in calls:
            getattr(copy, method)(*args, **kwargs)
        return copy

    @property
    def calls(self) -> MetricCalls:
        """The calls of the present step on this rank, for the ranks that run other shares of the batch."""
        return {} if self._step is None else self._step.calls

    def adopt_calls(self, calls: MetricCalls) -> None:
        """Replace the calls of the present step."""
        if self._step is not None:
            self._step.calls = calls

    def numbers(self) -> list[dict[Argument, float]]:
        """The numbers among the arguments of the calls, by microbatch."""
        return [
            {
                Argument(fqn, number, name): float(value)
                for fqn, row in found.items()
                for number, (_, args, kwargs) in enumerate(row)
                for name, value in named_arguments(args, kwargs).items()
                if is_number(value)
            }
            for _, found in sorted(self.calls.items())
        ]

    def take_numbers(self) -> dict[Argument, float]:
        """Forget the calls of one microbatch; returns the numbers among their arguments."""
        found = self.numbers()
        self.calls.clear()
        return found[0] if found else {}

    def origin(self, value: Any) -> tuple[str, int, int] | None:
        """The metric, the number of its call and the leaf of the result that a value is; None if it is none."""
        found = None if self._step is None else self._step.returned.get(id(value))
        return found[1] if found is not None and found[0] is value else None

    @torch.no_grad()
    def finish(self, fqn: str, microbatches: Microbatches, calls: MetricCalls | None = None) -> list[list[Any]] | None:
        """Call one metric for the full batch, once; None if the microbatches make different calls, which are all made.

        Otherwise returns the leaves of the result of each call. ``calls`` are those of all ranks that share the batch;
        this rank's if None.
        """
        step = self._step
        assert step is not None
        if fqn in step.results:
            return step.results[fqn]
        step.results[fqn] = None
        rows = {i: found[fqn] for i, found in sorted((step.calls if calls is None else calls).items()) if fqn in found}
        methods = [[method for method, *_ in row] for row in rows.values()]
        longest = max(methods, key=len, default=[])
        if any(each != longest[: len(each)] for each in methods):
            for row in rows.values():
                for method, args, kwargs in row:
                    self._methods[fqn, method](*args, **kwargs)
            return None
        results = []
        for number, method in enumerate(longest):
            present = {i: row[number][1:] for i, row in rows.items() if number < len(row)}
            leaves = ((i, leaf) for i, call in present.items() for leaf in flatten(call)[0])
            differ = differ_in_rows(list(present.values()), [microbatches.sizes[i] for i in present])
            is_part = differ or len(present) < len(microbatches.weights)
            if is_part or any(microbatches.is_selected(i, leaf) for i, leaf in leaves):
                self._selecting.add((fqn, number))
            selects = (fqn, number) in self._selecting
            args, kwargs = join_arguments(present, microbatches, call=(fqn, number), selects=selects)
            device = next((m.device for m in self._sinks[fqn].modules() if isinstance(m, Metric)), None)
            if calls is not None and device is not None:
                args, kwargs = map_tensors(methodcaller("to", device), (args, kwargs))
            results.append(flatten(self._methods[fqn, method](*args, **kwargs))[0])
        step.results[fqn] = results
        return results

    def finish_all(self, microbatches: Microbatches, calls: MetricCalls | None = None) -> None:
        """Call all metrics of this step for the full batch, as ``finish`` does."""
        for fqn in self._sinks:
            if any(fqn in found for found in (self.calls if calls is None else calls).values()):
                self.finish(fqn, microbatches, calls)

    def result(self, origin: tuple[str, int, int]) -> Any:
        """The leaf of a result for the full batch, of a call that ``origin`` has named; None if it is not known."""
        return None if self._step is None else self._leaf(self._step.results, origin)

    def values(self) -> Callable[[Metric | None, Any], float | None]:
        """A function that returns the number that a step has logged, for the full batch.

        It takes the logged metric, or the call of a metric that has returned the number; it returns None where the step
        has not called that, or where it is no number.
        """
        results = {} if self._step is None else dict(self._step.results)
        modules = (
            module for fqn, found in results.items() if found is not None for module in self._sinks[fqn].modules()
        )
        caches = {id(metric): metric._forward_cache for metric in modules if isinstance(metric, Metric)}

        def value(metric: Metric | None, origin: tuple[str, int, int] | None) -> float | None:
            found = self._leaf(results, origin) if metric is None else caches.get(id(metric))
            return float(found) if isinstance(found, Tensor) and found.numel() == 1 else None

        return value

    @staticmethod
    def _leaf(results: Mapping[str, list[list[Any]] | None], origin: tuple[str, int, int] | None) -> Any:
        fqn, number, position = origin or ("", 0, 0)
        calls = results.get(fqn)
        leaves = calls[number] if calls is not None else []
        return leaves[position] if position < len(leaves) else None


def joined_calls(rows: Sequence[tuple[int, MetricCalls]]) -> MetricCalls:
    """The calls of ranks that share a batch; with each the number of its microbatches."""
    joined: MetricCalls = defaultdict(dict)
    first = 0
    for count, calls in rows:
        joined.update({first + index: found for index, found in calls.items()})
        first += count
    return joined


def _detached(tensor: Tensor) -> Tensor:
    detached = tensor.detach()
    copy_mark(tensor, detached)
    return detached


def _cloned(value: Any) -> Any:
    """A tensor of its own for each place of a result: a metric may return one for several, or its state."""
    return map_tensors(Tensor.clone, value)


def _doubled(value: Any) -> Any:
    return map_tensors(lambda tensor: torch.cat([tensor, tensor]) if tensor.dim() else tensor, value)
