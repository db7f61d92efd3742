"""Sums over the samples of a batch: they add up over microbatches."""

from __future__ import annotations

import math
from collections.abc import Mapping

from lightning_hybrid.graph.step_graph import Node, StepGraph

SUMS = frozenset({"sum", "nansum", "count_nonzero"})
# They change nothing but what a number is kept as.
HANDED_ON = frozenset(
    {"detach", "clone", "contiguous", "to", "cpu", "cuda", "float", "double", "half", "bfloat16", "long", "int"}
    | {"get_data", "type_as", "item", "view_as"}
)
# Sums over the samples if these are no dimension of the result.
_CONTRACTIONS = SUMS | {"matmul", "__matmul__", "__rmatmul__", "mm", "einsum", "tensordot", "bincount", "histc"}
_NEGATED = frozenset({"neg", "__neg__"})
_ADDED = frozenset({"add", "__add__", "__radd__"})
ARRANGED = frozenset(
    {"stack", "cat", "view", "reshape", "flatten", "unflatten", "ravel", "squeeze", "unsqueeze", "t", "transpose"}
    | {"permute", "get_T", "get_mT", "diag", "diagonal", "__getitem__"}
)


def alike(part: StepGraph, whole: StepGraph) -> dict[int, int]:
    """The values of a step on the whole batch that it makes on a microbatch too, each with that.

    Operations that make a value per sample (``list(output)``) make more on the whole batch: those have no counterpart.
    """
    pairs: dict[int, int] = {}
    for small, large in zip(part.nodes, whole.nodes, strict=True):
        if len(small.outputs) == len(large.outputs):
            pairs.update(zip(large.outputs, small.outputs, strict=True))
    return pairs


def is_total_over_samples(value: int, part: StepGraph, whole: StepGraph, pairs: Mapping[int, int]) -> bool:
    """Whether a value is known to be a sum over the samples, and nothing else beside.

    Args:
        value: In the graph of the whole batch.
        part: The step on a microbatch.
        whole: The step on all of them.
        pairs: The values of ``whole`` that are in ``part`` too.
    """
    makers = {output: node for node in reversed(whole.nodes) for output in node.outputs}
    known: dict[int, bool] = {}

    def has_samples(one: int) -> bool:
        large = whole.values[one]
        return large.dynamic or part.values[pairs.get(one, one)].shape != large.shape

    def is_total(one: int) -> bool:
        if one not in known:
            known[one] = False
            node = makers.get(one)
            if node is not None and (node.name == "bincount" or not has_samples(one)):
                known[one] = of(node, one)
        return known[one]

    def of(node: Node, made: int) -> bool:
        if node.unit is not None or node.parameters or not node.inputs:
            return False
        if node.name in _CONTRACTIONS or node.averages == "sum":
            return all(has_samples(one) for one in node.inputs)
        if node.name not in _ADDED | ARRANGED | HANDED_ON | _NEGATED or not all(map(is_total, node.inputs)):
            return False
        if node.name in _ADDED:
            return len(node.inputs) > 1  # the other is no value of the model otherwise
        if node.name in ARRANGED and len(node.inputs) > 1:
            sizes = [math.prod(whole.values[one].shape) for one in node.inputs]
            return sum(sizes) == math.prod(whole.values[made].shape)  # otherwise others are among them
        return len(node.inputs) == 1 or node.name in ARRANGED

    return is_total(value)
