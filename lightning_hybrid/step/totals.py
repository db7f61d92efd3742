"""Sums over the samples of a batch, also once more is done with them: counts per class, matrices of confusion.

What is a sum in each microbatch is the sum of these in the batch. A step may add it to what it found on its module
(``self.counts = self.counts + new``); that is in each microbatch's result, and once in the batch's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_hybrid.step.graph import Node, StepGraph

SUMS = frozenset({"sum", "nansum", "count_nonzero"})
# They change nothing but what a number is kept as.
HANDED_ON = frozenset(
    {"detach", "clone", "contiguous", "to", "cpu", "cuda", "float", "double", "half", "bfloat16", "long", "int"}
    | {"get_data", "type_as", "item", "view_as"}
)
# Sums over the samples if these are no dimension of the result.
_CONTRACTIONS = SUMS | {"matmul", "__matmul__", "__rmatmul__", "mm", "einsum", "tensordot", "bincount", "histc"}
_SCATTERED = frozenset({"scatter_add", "scatter_add_", "index_add", "index_add_"})
_NEGATED = frozenset({"neg", "__neg__"})
_ADDED = frozenset({"add", "__add__", "__radd__"})
ARRANGED = frozenset(
    {"stack", "cat", "view", "reshape", "flatten", "unflatten", "ravel", "squeeze", "unsqueeze", "t", "transpose"}
    | {"permute", "get_T", "get_mT", "diag", "diagonal", "__getitem__"}
)


class Total(NamedTuple):
    """How a value is a sum over the samples.

    Attributes:
        bases: Nodes that add it to something else.
        is_arranged: Whether what came of these was put into another shape.
    """

    bases: frozenset[int] = frozenset()
    is_arranged: bool = False


def total_over_samples(value: int, part: StepGraph, whole: StepGraph, pairs: Mapping[int, int]) -> Total | None:
    """Whether a value is a sum over the samples; None if that is not known.

    Args:
        value: In the graph of the whole batch.
        part: The step on a microbatch.
        whole: The step on all of them.
        pairs: The values of ``whole`` that are in ``part`` too.
    """
    makers = {output: node for node in reversed(whole.nodes) for output in node.outputs}
    known: dict[int, Total | None] = {}

    def has_samples(one: int) -> bool:
        large = whole.values[one]
        return large.dynamic or part.values[pairs.get(one, one)].shape != large.shape

    def total(one: int) -> Total | None:
        if one not in known:
            known[one] = None
            node = makers.get(one)
            if node is not None and (node.name == "bincount" or not has_samples(one) or is_of_bincount(one)):
                known[one] = of(node, one)
        return known[one]

    def is_of_bincount(one: int) -> bool:
        """Its length depends on the data, and is the same in each microbatch if the user said how long it is."""
        while (node := makers.get(one)) is not None and len(node.inputs) == 1:
            if node.name == "bincount":
                return True
            (one,) = node.inputs
            if node.name not in HANDED_ON | ARRANGED | _ADDED:
                return False
        return False

    def of(node: Node, made: int) -> Total | None:
        if node.unit is not None or node.parameters or not node.inputs:
            return None
        if node.name in _CONTRACTIONS or node.averages == "sum":
            return Total() if all(has_samples(one) for one in node.inputs) else None
        rest = node.inputs
        if node.name in _SCATTERED:
            rest = tuple(one for one in rest if not has_samples(one))
            if not rest:
                return Total(frozenset({node.index}))
        elif node.name not in _ADDED | ARRANGED | HANDED_ON | _NEGATED:
            return None
        totals = [total(one) for one in rest]
        bases: set[int] = set()
        for one in totals:
            if one is None:
                return None
            bases |= one.bases
        is_arranged = any(one is not None and one.is_arranged for one in totals)
        if node.name in _ADDED:
            return Total(frozenset(bases | {node.index} if len(rest) == 1 else bases), is_arranged)
        if node.name in ARRANGED:
            sizes = [math.prod(whole.values[one].shape) for one in rest]
            if len(rest) > 1 and sum(sizes) != math.prod(whole.values[made].shape):
                return None  # other values are among them
            return Total(frozenset(bases), is_arranged or bool(bases))
        return Total(frozenset(bases), is_arranged) if len(rest) == 1 else None

    return total(value)


def summed(parts: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The sum of what the microbatches made; counts that no sample of one has are missing at its end."""
    del weights
    if parts[0].dim() == 1:
        longest = max(len(part) for part in parts)
        parts = [F.pad(part, (0, longest - len(part))) for part in parts]
    return torch.stack(list(parts)).sum(0).to(parts[0].dtype)
