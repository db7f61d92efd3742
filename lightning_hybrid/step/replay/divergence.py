"""Divergence of a run from its recording (``StepChanged``), and the cause that the error reports.

The cause may be a data-dependent size: ``if len(h[mask]):``, ``for c in torch.unique(k):``. A recording guesses those
that depend on values of the model. As numbers they are right in each batch; a step that branches on one takes another
trace than the recorded one as soon as it differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.errors import WITHOUT_STAGES, StepChanged
from lightning_hybrid.graph.step_graph import Node, StepGraph
from lightning_hybrid.step.standins.marks import Marks
from lightning_hybrid.step.standins.tensors import is_absent
from lightning_hybrid.step.tracing.recording import returned_values

_NONE = "no value of the model"
_ADVICE = {
    "values of the model": "Decide from the batch alone, use torch.where or sums over a mask",
    "the content of the batch": "Test the mask itself (mask.any(), int(mask.sum())), which is read in each batch",
}


class Divergence:
    """Finds the cause of a divergence between one run of a step and its recording.

    Attributes:
        has_guessed: Whether the step read the recorded size where the size depends on values of another rank.
    """

    def __init__(self, graph: StepGraph) -> None:
        self._graph = graph
        self.has_guessed = False
        self._read: dict[int, tuple[tuple[int, ...], str]] = {}

    def size_read(self, value: int, tensor: Tensor, line: Callable[[], str]) -> None:
        """Record that the step reads the shape of a value: it may branch on it if it is not the recorded one."""
        recorded = self._graph.values[value]
        self.has_guessed |= recorded.dynamic and is_absent(tensor)
        if recorded.dynamic and tensor.shape != recorded.shape:
            self._read.pop(value, None)
            self._read[value] = tuple(tensor.shape), line()

    def error(self, change: str) -> StepChanged:
        """The error to raise for a divergence that ``change`` describes."""
        for value, (shape, line) in reversed(self._read.items()):
            maker = self._op_that_sized(value)
            if maker is not None:
                return StepChanged(
                    f"{line}: the step branches on the size of a tensor, or loops over it, and that size depends on"
                    f" {maker.sized_by}: {maker.name} at {maker.line} computes it. Its shape is {shape} now and was"
                    f" {self._graph.values[value].shape} when the step was recorded, so that {change}."
                    f" {_ADVICE[maker.sized_by]}, or {WITHOUT_STAGES}",
                    entry="size-branch",
                )
        return StepChanged(
            f"{change}; its control flow depends on something that no guard covers (such as a global variable, or a"
            " result of torch.jit.script); keep that as an attribute of the module, make the step the same on every"
            f" batch, or {WITHOUT_STAGES}",
            entry="step-changed",
        )

    def of_operation(self, node: Node, now: str) -> StepChanged:
        """The error to raise where the operation of this run, ``now``, differs from the recorded node."""
        return self.error(
            f"operation {node.index} of the step was {self.operation(node.name, node.inputs, node.line)} when it was"
            f" recorded and {now}"
        )

    def operation(self, name: str, inputs: Sequence[int], line: str) -> str:
        """Describe an operation by its name, the operations that made its inputs, and its line."""
        return f"{name.removeprefix('@')}{' of ' if inputs else ''}{self._describe(inputs)} at {line}"

    def check_returned(self, result: Any, marks: Marks) -> None:
        """Check that the step returns the recorded values; the backward starts from the recorded scalar loss."""
        old = self._graph.returned
        now, loss = returned_values(result, marks)
        if now != old or self._graph.loss not in (None, loss):
            raise self.error(
                f"the step returned {self._describe(old) or _NONE} when it was recorded and returns"
                f" {self._describe(now) or _NONE} now"
            )

    def _describe(self, values: Sequence[int]) -> str:
        described = []
        for value in values:
            maker = self._graph.made_by(value)
            which = f"output {maker.outputs.index(value)}" if len(maker.outputs) > 1 else "the result"
            described.append(f"{which} of {maker.name.removeprefix('@')} ({maker.line})")
        return ", ".join(described)

    def _op_that_sized(self, value: int) -> Node | None:
        """The operation through which the size of a value depends on more than shapes."""
        stack, visited = [value], {value}
        while stack:
            maker = self._graph.made_by(stack.pop())
            if maker.sized_by:
                return maker
            found = [v for v in maker.inputs if self._graph.values[v].dynamic and v not in visited]
            stack += found
            visited.update(found)
        return None


def shape_changed(line: str, recorded: Sequence[int], now: Sequence[int]) -> StepChanged:
    """The error to raise where a value has another shape than was recorded, which other stages use."""
    return StepChanged(
        f"{line}: a value of shape {tuple(recorded)} when the step was recorded now has shape {tuple(now)}, though the"
        f" batch has the same shapes; make it depend on the shapes of the batch alone, or {WITHOUT_STAGES}",
        entry="shape-changed",
    )


def dtype_changed(line: str, recorded: torch.dtype, now: torch.dtype) -> StepChanged:
    """The error to raise where a value has another dtype than was recorded, as which other ranks read its bytes."""
    return StepChanged(
        f"{line}: a value of dtype {recorded} when the step was recorded now has {now}, and other ranks expect the"
        f" recorded one; make it the same on every batch, such as by .to(dtype) on the result, or {WITHOUT_STAGES}",
        entry="dtype-changed",
    )
