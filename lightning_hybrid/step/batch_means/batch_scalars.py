"""Scalars of a step (losses, metric values, functions of them) for the whole batch.

``torch.exp(loss)`` of the batch is no mean over its microbatches, but ``torch.exp`` of the batch's loss. So operations
that take nothing but numbers are computed once more, on the numbers of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_hybrid.graph.step_graph import SINK, Node, StepGraph
from lightning_hybrid.step.batch_means.batch_metrics import BatchMetrics
from lightning_hybrid.step.batch_means.linear_terms import is_linear
from lightning_hybrid.step.objects.pytree import Spec, flatten, unflatten
from lightning_hybrid.step.standins.absent_tensors import is_absent
from lightning_hybrid.step.standins.deferred_tensors import Deferred
from lightning_hybrid.step.tracing.recording import Template


def scalar_nodes(graph: StepGraph) -> frozenset[int]:
    """The operations that make numbers, and those that take nothing else."""
    numbers = {value.index for value in graph.values if not value.shape}
    found = set()
    for node in graph.nodes:
        of_numbers = node.inputs and numbers.issuperset(node.inputs) and not (node.unit or node.parameters)
        if of_numbers or node.name.startswith(SINK):
            numbers.update(node.outputs)
        if not node.written and numbers.issuperset(node.outputs):
            found.add(node.index)
    return frozenset(found)


class _Call(NamedTuple):
    """One operation on numbers.

    Attributes:
        node: The operation.
        run: Computes it; None if that is no matter of its arguments alone.
        leaves: Of its arguments; an index in place of a value of the step.
        spec: Of these.
        place: Which leaf of its result is wanted.
    """

    node: Node
    run: Callable[..., Any] | None
    leaves: list[Any]
    spec: Spec | None
    place: int


class _Index(int):
    """That of a value, among arguments."""


@dataclass
class ScalarResults:
    """What one stage computed of numbers in one microbatch.

    Attributes:
        values: By index.
        calls: What made them, by index.
    """

    values: dict[int, Tensor] = field(default_factory=dict)
    calls: dict[int, _Call] = field(default_factory=dict)

    def note(
        self,
        node: Node,
        run: Callable[..., Any] | None,
        args: Any,
        kwargs: Any,
        results: Sequence[Any],
        template: Template,
        mark_of: Callable[[Tensor], int | None],
    ) -> None:
        """Note one operation.

        Args:
            node: The operation.
            run: Computes it once more; None if it must not be.
            args: Its arguments.
            kwargs: Likewise.
            results: The leaves of its result.
            template: Says which values they are.
            mark_of: Which value a tensor is.
        """
        leaves, spec = flatten((args, kwargs))
        if any(isinstance(leaf, Deferred) for leaf in (*leaves, *results)):
            return
        if (
            node.unit or node.parameters or template.written or ":" in node.name
        ):  # a function of the user's, or one that asks other ranks
            run = None
        held: list[Any] = []
        for leaf in leaves if run is not None else ():
            mark = mark_of(leaf) if isinstance(leaf, Tensor) else None
            if isinstance(leaf, Tensor) and leaf.dim() and mark not in self.values:  # no number, nor a metric's value
                run, held = None, []
                break
            if mark is not None:
                self.values.setdefault(mark, leaf.detach())
            held.append(leaf if mark is None else _Index(mark))
        for place, (leaf, described) in enumerate(zip(results, template.leaves, strict=True)):
            if described.value is not None and isinstance(leaf, Tensor):
                self.values[described.value] = leaf.detach()
                if described.input is None:
                    self.calls[described.value] = _Call(node, run, held, spec, place)

    def joined(self, earlier: ScalarResults) -> ScalarResults:
        """With what another stage of this rank computed."""
        return ScalarResults({**earlier.values, **self.values}, {**earlier.calls, **self.calls})


class BatchScalars:
    """The numbers of a step for the whole batch, as far as this rank knows those of the microbatches."""

    def __init__(self, parts: Sequence[ScalarResults], weights: Sequence[float], metrics: BatchMetrics) -> None:
        """Args: parts: by microbatch. weights: of these. metrics: of the batch."""
        self._parts, self._metrics = parts, metrics
        total = sum(weights)
        self._weights = [weight / total if total else 1 / len(weights) for weight in weights]
        self._known: dict[int, tuple[Tensor | None, bool]] = {}

    def value(self, index: int) -> Tensor | None:
        """A number of the batch; None if this rank cannot tell."""
        return self._of(index)[0]

    def is_mean(self, index: int) -> bool:
        """Whether it is the mean of those of the microbatches."""
        return self._of(index)[1]

    def _of(self, index: int) -> tuple[Tensor | None, bool]:
        if index not in self._known:
            self._known[index] = None, True
            self._known[index] = self._compute(index)
        return self._known[index]

    def _compute(self, index: int) -> tuple[Tensor | None, bool]:
        found = self._computed(index)
        mean = self._mean(index)
        if found is None or mean is None or found.dim():
            return (mean, True) if found is None else (found, False)
        rounding = 8 * torch.finfo(mean.dtype).eps * abs(float(mean))
        is_mean = abs(float(found) - float(mean)) <= rounding
        return (mean, True) if is_mean else (found, False)

    def _computed(self, index: int) -> Tensor | None:
        """A number that is no mean of those of the microbatches."""
        calls = [part.calls.get(index) for part in self._parts]
        call = calls[0]
        if call is not None and all(other is not None and other.node.name == call.node.name for other in calls):
            if call.node.name.startswith(SINK):
                return self._of_metric(call, index)
            if not is_linear(call.node) or not all(map(self.is_mean, call.node.inputs)):
                return self._once_more(call, [other.leaves for other in calls if other is not None])
        return None

    def _mean(self, index: int) -> Tensor | None:
        values = [part.values.get(index) for part in self._parts]
        present = [value for value in values if value is not None and not is_absent(value) and not value.dim()]
        if len(present) < len(values) or not present[0].is_floating_point():
            return None
        total = sum(float(value) * weight for value, weight in zip(present, self._weights, strict=True))
        return present[0].new_tensor(total)

    def _of_metric(self, call: _Call, index: int) -> Tensor | None:
        if call.node.name.endswith(".compute"):  # of all that the metric has seen
            return self._parts[-1].values.get(index)
        leaves = self._metrics.result(call.node) if call.node.name.endswith(".forward") else None
        found = leaves[call.place] if leaves is not None and call.place < len(leaves) else None
        return found if isinstance(found, Tensor) else None

    def _once_more(self, call: _Call, given: Sequence[list[Any]]) -> Tensor | None:
        """An operation on the numbers of the batch; None if it takes something else of each microbatch."""
        if call.run is None or any(len(leaves) != len(call.leaves) for leaves in given):
            return None
        arguments = []
        for column in zip(*given, strict=True):
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
        found = made[call.place] if call.place < len(made) else None
        return found if isinstance(found, Tensor) else None


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)
