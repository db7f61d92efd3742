"""Scalars of a step (losses, metric values, functions of them) for the full batch.

``torch.exp(loss)`` of the batch is no mean over its microbatches, but ``torch.exp`` of the batch's loss. So operations
on scalars alone are recomputed on the scalars of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from lightning_hybrid.batch.means import SCALED, is_linear, reduction_of
from lightning_hybrid.batch.merge import Argument, Leaf, Microbatches
from lightning_hybrid.batch.metrics import FullBatchMetrics
from lightning_hybrid.graph.step_graph import SINK, Node, StepGraph
from lightning_hybrid.host_copies import read_numbers
from lightning_hybrid.step.objects.pytree import Spec, flatten, unflatten
from lightning_hybrid.step.objects.tensors import on_host
from lightning_hybrid.step.standins.marks import Marks, mark_in_any_run
from lightning_hybrid.step.standins.tensors import ShardedTensorBase, is_absent
from lightning_hybrid.step.tracing.recording import Template


def scalar_nodes(graph: StepGraph) -> frozenset[int]:
    """Indices of the nodes whose outputs are all scalars, or computed from scalars alone."""
    scalars = {value.index for value in graph.values if not value.shape}
    nodes = set()
    for node in graph.nodes:
        of_numbers = node.inputs and scalars.issuperset(node.inputs) and not (node.unit or node.parameters)
        if of_numbers or node.name.startswith(SINK):
            scalars.update(node.outputs)
        if not node.written and scalars.issuperset(node.outputs):
            nodes.add(node.index)
    return frozenset(nodes)


class _Call(NamedTuple):
    """One operation on scalars."""

    node: Node  # the operation
    run: Callable[..., Any] | None  # computes it; None if its result depends on more than its arguments
    leaves: list[Any]  # leaves of its arguments; an ``_Index`` in place of a value of the step
    spec: Spec | None  # containers of the leaves
    position: int  # index of the requested leaf of its result
    origin: tuple[str, int, int] | None  # for calls of metrics, as ``FullBatchMetrics.origin``


class _Index(int):
    """The index of a value, among arguments."""


SentScalars: TypeAlias = tuple[dict[int, Tensor], dict[int, list[Any]]]  # values, and leaves of arguments, by value


def _picklable(leaf: Any) -> Any:
    """A leaf of arguments, or what is the same as no other."""
    if isinstance(leaf, Tensor):
        return on_host(leaf) if not leaf.dim() else math.nan
    return leaf if isinstance(leaf, bool | int | float | str | torch.dtype | None) else math.nan


@dataclass
class ScalarResults:
    """The scalars that one stage computed in one microbatch."""

    values: dict[int, Tensor] = field(default_factory=dict)  # scalars and metric values, by value index
    calls: dict[int, _Call] = field(default_factory=dict)  # the operations that made them, by value index

    def record(
        self,
        node: Node,
        run: Callable[..., Any] | None,
        args: Any,
        kwargs: Any,
        results: Sequence[Any],
        template: Template,
        marks: Marks,
        origin: Callable[[Any], tuple[str, int, int] | None],
    ) -> None:
        """Record one operation, and the scalars that it reads and makes.

        ``run`` recomputes it, unless it is None. ``results`` are the leaves of its result, scalars and values of
        metrics of any shape, and ``template`` describes which values these are.
        """
        leaves, spec = flatten((args, kwargs))
        if any(isinstance(leaf, ShardedTensorBase) for leaf in (*leaves, *results)):
            return
        # With a colon: a user's function, or one that communicates with other ranks.
        if node.unit or node.parameters or template.written or ":" in node.name:
            run = None
        arguments: list[Any] = []
        for leaf in leaves if run is not None else ():
            mark = marks.of(leaf)
            if isinstance(leaf, Tensor) and leaf.dim() and mark not in self.values:  # no scalar, nor a metric's value
                run, arguments = None, []
                break
            if mark is not None:
                self.values.setdefault(mark, leaf.detach())
            arguments.append(leaf if mark is None else _Index(mark))
        for position, (leaf, described) in enumerate(zip(results, template.leaves, strict=True)):
            if described.value is not None and isinstance(leaf, Tensor):
                self.values[described.value] = leaf.detach()
                if described.input is None:
                    self.calls[described.value] = _Call(node, run, arguments, spec, position, origin(leaf))

    def sent(self) -> SentScalars:
        """What another rank needs that runs the same operations on other microbatches; picklable, on the host."""
        leaves = {value: [_picklable(leaf) for leaf in call.leaves] for value, call in self.calls.items()}
        return {value: on_host(scalar) for value, scalar in self.values.items()}, leaves

    def received(self, sent: SentScalars) -> ScalarResults:
        """The scalars of a microbatch that another rank has sent; this one's operations made them too."""
        values, leaves = sent
        values = {i: v.to(self.values[i].device) if i in self.values else v for i, v in values.items()}
        calls = self.calls.items()
        return ScalarResults(values, {i: call._replace(leaves=leaves[i]) for i, call in calls if i in leaves})

    def joined(self, earlier: ScalarResults) -> ScalarResults:
        """Merge with the scalars that another stage of this rank computed."""
        return ScalarResults({**earlier.values, **self.values}, {**earlier.calls, **self.calls})


class BatchScalars(Microbatches):
    """Scalars of a step for the full batch, as far as this rank knows the scalars of the microbatches."""

    def __init__(
        self,
        microbatches: Sequence[ScalarResults],
        weights: Sequence[float],
        sizes: Sequence[int | None],
        metrics: FullBatchMetrics,
        graphs: Sequence[StepGraph],
        reductions: Mapping[Any, str] | None = None,
        by_samples: frozenset[Any] = frozenset(),
    ) -> None:
        """Take what one stage computed; ``graphs`` has a graph for each microbatch, the rest is as in the base."""
        total = sum(weights)
        shares = [weight / total if total else 1 / len(weights) for weight in weights]
        super().__init__(shares, sizes, reductions or {}, by_samples)
        self._microbatches, self._metrics, self._graphs = microbatches, metrics, graphs
        self._cache: dict[int, tuple[Tensor | None, str]] = {}

    def value(self, index: int) -> Tensor | None:
        """A scalar, or metric value of any shape, of the full batch, by index; None if this rank cannot compute it."""
        return self._value_and_kind(index)[0]

    def kind(self, index: int) -> str:
        """How microbatches' scalars give the scalar: "mean" (weighted), "sum", "max", "min"; "" in another way."""
        return self._value_and_kind(index)[1]

    def is_mean(self, index: int) -> bool:
        """Whether the scalar is the weighted mean of the microbatches' scalars."""
        return self.kind(index) == "mean"

    def _value_and_kind(self, index: int) -> tuple[Tensor | None, str]:
        if index not in self._cache:
            self._cache[index] = None, "mean"
            self._cache[index] = self._compute(index)
        return self._cache[index]

    def _compute(self, index: int) -> tuple[Tensor | None, str]:
        if how := reduction_of(index, self._graphs[0], self.sizes[0] or 0):
            reductions: dict[str, Callable[..., Tensor]] = {"sum": sum, "max": max, "min": min}
            return (reductions[how](present) if (present := self._present(index)) else None), how
        on_batch = self._computed(index)
        mean = self._mean(index)
        if on_batch is None or mean is None or on_batch.dim():
            return (mean, "mean") if on_batch is None else (on_batch, self._kind_of_inputs(index))
        computed, expected = read_numbers([on_batch, mean])
        is_mean = abs(computed - expected) <= 8 * torch.finfo(mean.dtype).eps * abs(expected)
        return (mean, "mean") if is_mean else (on_batch, self._kind_of_inputs(index))

    def _kind_of_inputs(self, index: int) -> str:
        """A linear function of sums is a sum."""
        call = self._microbatches[0].calls.get(index)
        if call is None or not is_linear(call.node) or _is_scaled_by_number(call):
            return ""
        return "sum" if all(self.kind(i) == "sum" for i in call.node.inputs) else ""

    def _computed(self, index: int) -> Tensor | None:
        """A scalar that is no mean of the microbatches' scalars: a metric value, or recomputed; else None."""
        calls = [results.calls.get(index) for results in self._microbatches]
        call = calls[0]
        if call is not None and all(other is not None and other.node.name == call.node.name for other in calls):
            if call.node.name.startswith(SINK):
                return self._metric_value(call, index)
            # A sum over a number of the batch, such as that of samples or of a mask, is a mean.
            known = {"mean", "sum"} if _is_scaled_by_number(call) else {"mean"}
            if not is_linear(call.node) or not known.issuperset(map(self.kind, call.node.inputs)):
                return self._rerun(call, [other.leaves for other in calls if other is not None])
        return None

    def _mean(self, index: int) -> Tensor | None:
        present = self._present(index)
        if not present or not present[0].is_floating_point():
            return None
        pairs = zip(present, self.weights, strict=True)
        return torch.stack([value.double() * weight for value, weight in pairs]).sum(0).to(present[0].dtype)

    def _present(self, index: int) -> list[Tensor]:
        """The scalars of the microbatches, or what is stacked of them; none if one is not on this rank."""
        values = [results.values.get(index) for results in self._microbatches]
        present = [value for value in values if value is not None and not is_absent(value)]
        is_whole = len(present) == len(values) and len({value.shape for value in present}) == 1
        return present if is_whole else []

    def _metric_value(self, call: _Call, index: int) -> Tensor | None:
        if call.origin is None:  # it was called with the full batch
            return self._microbatches[-1].values.get(index)
        self._metrics.finish(call.origin[0], self)
        value = self._metrics.result(call.origin)
        return value if isinstance(value, Tensor) else None

    def is_selected(self, microbatch: int, leaf: Any) -> bool:
        """Whether the content of the batch decides how many rows an argument of a metric, of any shape, has."""
        index = mark_in_any_run(leaf)
        return index is not None and self._graphs[microbatch].values[index].dynamic

    def scalar_of(self, column: list[Any]) -> Tensor | None:
        """The scalar of the batch, from the scalars that a metric was called with in each microbatch."""
        index = _index_of(column)
        return None if index is None else self.value(index)

    def number_of(self, argument: Argument | Leaf, column: Mapping[int, Any]) -> Any:
        """The number of the full batch as measured, where the graph has none of another kind than a mean."""
        index = _index_of(column.values())
        return super().number_of(argument, column) if index is None or self.is_mean(index) else None

    def _rerun(self, call: _Call, arguments_by_microbatch: Sequence[list[Any]]) -> Tensor | None:
        """Recompute an operation on the scalars of the batch; None if other arguments differ between microbatches."""
        if call.run is None or any(len(leaves) != len(call.leaves) for leaves in arguments_by_microbatch):
            return None
        arguments = []
        for column in zip(*arguments_by_microbatch, strict=True):
            if any(not _is_same(one, column[0]) for one in column[1:]):
                return None
            found = self.value(column[0]) if isinstance(column[0], _Index) else column[0]
            if isinstance(column[0], _Index) and found is None:
                return None
            arguments.append(found)
        args, kwargs = unflatten(arguments, call.spec)
        try:
            with torch.no_grad():
                made = flatten(call.run(*args, **kwargs))[0]
        except Exception:  # such as a derivative, which needs the graph
            return None
        found = made[call.position] if call.position < len(made) else None
        return found if isinstance(found, Tensor) else None


def _index_of(column: Iterable[Any]) -> int | None:
    """The index of the one value that the microbatches' scalars are."""
    indices = {mark_in_any_run(scalar) for scalar in column} - {None}
    return indices.pop() if len(indices) == 1 else None


def _is_scaled_by_number(call: _Call) -> bool:
    """Whether an operand of a product or quotient is no value of the model: it may be a number of the batch."""
    return call.node.name in SCALED and any(
        isinstance(leaf, int | float | Tensor) and not isinstance(leaf, _Index) for leaf in call.leaves
    )


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)
