"""A replay without the operations of the model that computes the denominators of means (``step.batch_means``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_hybrid.graph.step_graph import Node
from lightning_hybrid.step.batch_means.mean_ops_and_denominators import count, labels_of, picked_rows
from lightning_hybrid.step.objects.tensor_storage_and_subclasses import storage_id
from lightning_hybrid.step.replay.execute_stage_by_rerunning_step import ReplayWatch, StageReplay


class DenominatorReplay(StageReplay):
    """A stage without operations; counts the elements, rows or labels of each mean.

    Attributes:
        counts: Denominators of the latest run, by node index.
        labels: Number of labels of a node if they are a tensor of the batch, and the ignored label, by node index.
        memory: ``storage_id`` of the tensors in the batch; set before a run.
    """

    counts: dict[int, Tensor | float]
    labels: dict[int, tuple[int, int]]
    memory: frozenset[int]

    def watch(self, received: Mapping[int, Tensor], parameters: Mapping[int, str]) -> ReplayWatch:
        """Create a function mode that counts; ``received`` are tensors of other stages by index, of any shapes."""
        return _DenominatorWatch(self, received, parameters)


class _DenominatorWatch(ReplayWatch):
    """Skips every event, and counts before."""

    def __init__(self, replay: DenominatorReplay, *rest: Any) -> None:
        super().__init__(replay, *rest)
        self._replay = replay
        replay.counts, replay.labels = {}, {}
        # Row counts of values whose size depends on the content of the batch.
        self._rows: dict[int, Tensor | float] = {}
        self._call: tuple[Any, Any] = (), {}

    def event(self, name: str, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any], owned: tuple[str, ...]) -> Any:
        self._call = args, kwargs
        return super().event(name, run, args, kwargs, owned)

    def _skip(self, node: Node, leaves: list[Any]) -> Any:
        args, kwargs = self._call
        rows: Tensor | float | None = picked_rows(node.name, args, kwargs, self.is_model_value)
        if rows is None:
            rows = next((self._rows[value] for value in node.inputs if value in self._rows), None)
        found = rows if node.averages == "rows" else None
        if node.averages not in ("", "inverse", "sum", "rows"):
            found = count(node.averages, node.name, args, kwargs, self.is_model_value)
        if found is not None:
            self._replay.counts[node.index] = found
        if node.averages == "classes" and (found_labels := labels_of(node.name, args, kwargs)) is not None:
            labels, ignored = found_labels
            if storage_id(labels) in self._replay.memory:
                self._replay.labels[node.index] = labels.numel(), ignored
        if rows is not None:
            self._rows.update((value, rows) for value in node.outputs if self._values[value].shape)
        return super()._skip(node, leaves)
