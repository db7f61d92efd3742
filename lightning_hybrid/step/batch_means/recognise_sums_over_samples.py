"""Sums over the samples of a batch: they add up over microbatches."""

from __future__ import annotations

import math
from collections.abc import Mapping

from lightning_hybrid.graph.step_graph import Node, StepGraph
from lightning_hybrid.step.objects.op_names import CASTS, names

SUMS = frozenset({"sum", "nansum", "count_nonzero"})
# Operations that change only dtype, device, memory or the autograd graph.
IDENTITIES = CASTS | names("cpu cuda long int get_data type_as item view_as")
# Sums over the samples if the result has no dimension of samples.
_CONTRACTIONS = SUMS | {"matmul", "__matmul__", "__rmatmul__", "mm", "einsum", "tensordot", "bincount", "histc"}
# By an operand that is no value of the model: the same in each microbatch, unless it is computed from the batch.
SCALED = frozenset({"neg", "__neg__", "mul", "multiply", "__mul__", "__rmul__", "div", "divide", "__truediv__"})
_ADDED = frozenset({"add", "__add__", "__radd__"})
REARRANGED = frozenset(
    {"stack", "cat", "view", "reshape", "flatten", "unflatten", "ravel", "squeeze", "unsqueeze", "t", "transpose"}
    | {"permute", "get_T", "get_mT", "diag", "diagonal", "__getitem__"}
)


_EXTREMES = {"max": "max", "amax": "max", "min": "min", "amin": "min"}


def reduction_of(value: int, graph: StepGraph, size: int) -> str:
    """How a scalar reduces over the samples of a microbatch: "sum", "max", "min"; "" if not by one such operation."""
    makers = graph.makers
    node = makers.get(value)
    while node is not None and node.name in IDENTITIES and len(node.inputs) == 1:
        node = makers.get(node.inputs[0])
    if node is None or node.unit is not None or not node.inputs:
        return ""
    if len(node.inputs) > 1 and node.averages != "sum":  # a loss may compare two values of the model
        return ""
    shape = graph.values[node.inputs[0]].shape
    made = makers.get(node.inputs[0])
    if not size or not shape or shape[0] % size or (made is not None and made.name in ("stack", "cat")):
        return ""
    if node.inputs[0] not in graph.of_units:
        return ""  # of parameters alone: equal in all microbatches
    return "sum" if node.name in SUMS or node.averages == "sum" else _EXTREMES.get(node.name, "")


def matching_values(local: StepGraph, full: StepGraph) -> dict[int, int]:
    """Map the values of a step on the full batch to those of the step on a microbatch.

    Operations that make a value per sample (``list(output)``) make more on the full batch: those have no counterpart.
    """
    pairs: dict[int, int] = {}
    for small, large in zip(local.nodes, full.nodes, strict=True):
        if len(small.outputs) == len(large.outputs):
            pairs.update(zip(large.outputs, small.outputs, strict=True))
    return pairs


def is_sum_over_samples(value: int, local: StepGraph, full: StepGraph, pairs: Mapping[int, int]) -> bool:
    """Whether a value of the full batch's graph is provably a sum over the samples, without other terms.

    ``local`` is the graph of a microbatch, and ``pairs`` the result of ``matching_values``.
    """
    makers = full.makers
    cache: dict[int, bool] = {}

    def has_samples(one: int) -> bool:
        large = full.values[one]
        return large.dynamic or local.values[pairs.get(one, one)].shape != large.shape

    def is_total(one: int) -> bool:
        if one not in cache:
            cache[one] = False
            node = makers.get(one)
            if node is not None and (node.name == "bincount" or not has_samples(one)):
                cache[one] = sums(node, one)
        return cache[one]

    def sums(node: Node, made: int) -> bool:
        if node.unit is not None or node.parameters or not node.inputs:
            return False
        if node.name in _CONTRACTIONS or node.averages == "sum":
            return all(has_samples(one) for one in node.inputs)
        if node.name not in _ADDED | REARRANGED | IDENTITIES | SCALED or not all(map(is_total, node.inputs)):
            return False
        if node.name in SCALED and node.averages:
            return False
        if node.name in _ADDED:
            return len(node.inputs) > 1  # otherwise the other term is no value of the model
        if node.name in REARRANGED and len(node.inputs) > 1:
            sizes = [math.prod(full.values[one].shape) for one in node.inputs]
            return sum(sizes) == math.prod(full.values[made].shape)  # otherwise it contains other terms
        return len(node.inputs) == 1 or node.name in REARRANGED

    return is_total(value)
