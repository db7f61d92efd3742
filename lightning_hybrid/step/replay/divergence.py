"""Divergence of a run from its recording (``StepChanged``), and the cause that its user is told.

The cause may be a size that depends on values: ``if len(h[mask]):``, ``for c in torch.unique(k):``. A recording guesses
those that depend on values of the model. As numbers they are right in each batch; a step that decides by one takes
another way than was recorded, once it is another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_hybrid.graph.step_graph import Node, StepGraph
from lightning_hybrid.step.standins.absent_tensors import is_absent
from lightning_hybrid.step.tracing.recording import StepError, returned_by

_ADVICE = {
    "values of the model": "Make the decision from the batch alone, use torch.where or sums over a mask",
    "the content of the batch": "Ask the mask itself by mask.any() or int(mask.sum()), which is seen in each batch",
}


class StepChanged(StepError):
    """The step did something else than when it was recorded."""


class Changes:
    """What one run of a step does otherwise than its recording.

    Attributes:
        has_guessed: Whether the step was told a size that depends on values of another rank, as it was recorded.
    """

    def __init__(self, graph: StepGraph) -> None:
        """Args: graph: the recording."""
        self._graph = graph
        self.has_guessed = False
        self._read: dict[int, tuple[tuple[int, ...], str]] = {}

    def size_read(self, value: int, tensor: Tensor, line: Callable[[], str]) -> None:
        """The step asks for the size of a value; if it is another one than in the recording, it may decide by it.

        Args:
            value: In the graph.
            tensor: That it is now.
            line: Says where the step asks.
        """
        known = self._graph.values[value]
        self.has_guessed |= known.dynamic and is_absent(tensor)
        if known.dynamic and tensor.shape != known.shape:
            self._read.pop(value, None)
            self._read[value] = tuple(tensor.shape), line()

    def error(self, change: str) -> StepChanged:
        """The error to raise.

        Args:
            change: What the step does otherwise.
        """
        for value, (shape, line) in reversed(self._read.items()):
            maker = self._sized_by(value)
            if maker is not None:
                return StepChanged(
                    f"{line}: the step decides by the size of a tensor, or loops over it, and that size depends on"
                    f" {maker.sized_by}: {maker.name} at {maker.line} has made it. Its shape is {shape} now and was"
                    f" {self._graph.values[value].shape} when the step was recorded, so that {change}."
                    f" {_ADVICE[maker.sized_by]}, or set pipeline_parallel_size=1"
                )
        return StepChanged(
            f"{change}; its control flow depends on something that is not looked at (such as a global variable, or what"
            " torch.jit.script has made): keep that as an attribute of the module, make the step the same on every"
            " batch, or set pipeline_parallel_size=1"
        )

    def of_operation(self, node: Node, now: str) -> StepChanged:
        """The error to raise where an operation is another one.

        Args:
            node: The operation.
            now: What it is instead.
        """
        return self.error(
            f"operation {node.index} of the step was {node.name} of the values {list(node.inputs)} at {node.line} when"
            f" it was recorded and {now}"
        )

    def check_returned(self, result: Any, mark_of: Callable[[Tensor], int | None]) -> None:
        """The step must return what it returned when it was recorded; the backward starts from the recorded loss.

        Args:
            result: What it returned.
            mark_of: The value that a tensor is.

        Raises:
            StepChanged: It does not.
        """
        then = self._graph.returned
        now, loss = returned_by(result, mark_of)
        if now != then or self._graph.loss not in (None, loss):
            raise self.error(
                f"the step returned {self._in_words(then)} when it was recorded and returns {self._in_words(now)} now"
            )

    def _in_words(self, values: tuple[int, ...]) -> str:
        makers = map(self._graph.made_by, values)
        made = [f"value {v} ({node.name} at {node.line})" for v, node in zip(values, makers, strict=True)]
        return ", ".join(made) or "no value of the model"

    def _sized_by(self, value: int) -> Node | None:
        """The operation that has given a value a size which depends on more than shapes."""
        waiting, seen = [value], {value}
        while waiting:
            wanted = waiting.pop()
            maker = self._graph.made_by(wanted)
            if maker.sized_by:
                return maker
            found = [v for v in maker.inputs if self._graph.values[v].dynamic and v not in seen]
            waiting += found
            seen.update(found)
        return None
