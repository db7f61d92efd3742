"""What the loss of a recorded step saves, and what its backward holds besides: `bytes_of_loss`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from lightning_hybrid.graph.step_graph import Node, StepGraph, Value

# Losses over classes that chunked_loss computes in chunks.
_OVER_CLASSES = frozenset({"cross_entropy", "nll_loss"})


class LossBytes(NamedTuple):
    """Bytes of one recorded step around its loss.

    Attributes:
        saved: Bytes that a loss over classes saves for its backward; 0 for other losses.
        backward: Bytes of gradients that are held at once, at the peak of the backward, besides all saved bytes.
    """

    saved: float
    backward: float


def bytes_of_loss(nodes: Sequence[Node], graph: StepGraph) -> LossBytes:
    """Return the bytes around the loss: the largest sum of what is live while the last nodes run backward.

    The backward of an operation holds the gradients of its results and of its arguments, those that wait for an earlier
    operation, and, of an operation such as ``cross_entropy`` that saves results of operations inside of it, gradients
    of these.

    Args:
        nodes: Of the last layer, in order; the loss is among their results.
        graph: Of the step.
    """
    memory = _memory_of_values(nodes, graph)
    gradients: dict[int, float] = {}
    freed = peak = 0.0
    for node in reversed(nodes):
        for index in (*node.inputs, *node.outputs):
            value = graph.values[index]
            if value.requires_grad and is_float(value):
                gradients[memory.get(index, index)] = value.nbytes
        inside = node.saved_bytes if node.unit is None else 0
        peak = max(peak, sum(gradients.values()) + inside - freed)
        kept = {memory.get(index, index) for index in node.inputs}
        for index in {memory.get(index, index) for index in node.outputs} - kept:
            gradients.pop(index, None)
        freed += node.saved_bytes
    if not any(node.name in _OVER_CLASSES for node in nodes):
        return LossBytes(0.0, peak)
    after = [node for node in nodes if not node.parameters]
    made = {index for node in nodes for index in node.outputs}
    saved = {memory.get(index, index) for node in after for index in node.saved_values if index in made}
    return LossBytes(sum(node.saved_bytes for node in after) + sum(graph.values[i].nbytes for i in saved), peak)


def _memory_of_values(nodes: Sequence[Node], graph: StepGraph) -> dict[int, int]:
    """The value whose memory a view has, by the view: gradients of both are one tensor."""
    found: dict[int, int] = {}
    for node in nodes:
        if node.unit is None and not node.moved_bytes and node.inputs:
            size = math.prod(graph.values[node.inputs[0]].shape)
            for index in node.outputs:
                if math.prod(graph.values[index].shape) == size:
                    found[index] = found.get(node.inputs[0], node.inputs[0])
    return found


def is_float(value: Value) -> bool:
    """Whether the value has floating-point elements."""
    return "float" in value.dtype
