"""Means over samples, labels or masks of a batch: how the means of microbatches give the mean of the batch.

Sums over the samples add up over microbatches. ``cross_entropy`` divides by the number of labels that are not ignored,
or by the sum of their class weights; other code divides a sum by a number computed from the batch. The mean over a
batch is then no mean over its microbatches, but each of these has a *count* by which its mean is weighted: ``mean =
sum(mean_i * count_i) / count``.

The means on which a loss depends linearly: these are weighted by the count of their microbatch.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_hybrid.graph.step_graph import REARRANGED, Averages, Node, StepGraph
from lightning_hybrid.step.objects.names import CASTS, names
from lightning_hybrid.step.objects.pytree import flatten

SUMS = frozenset({"sum", "nansum", "count_nonzero"})
# Operations that change only dtype, device, memory or the autograd graph.
IDENTITIES = CASTS | names("cpu cuda long int get_data type_as item view_as")
# Sums over the samples if the result has no dimension of samples.
_CONTRACTIONS = SUMS | {"matmul", "__matmul__", "__rmatmul__", "mm", "einsum", "tensordot", "bincount", "histc"}
# By an operand that is no value of the model: the same in each microbatch, unless it is computed from the batch.
SCALED = frozenset({"neg", "__neg__", "mul", "multiply", "__mul__", "__rmul__", "div", "divide", "__truediv__"})
_ADDED = frozenset({"add", "__add__", "__radd__"})
_REARRANGED = REARRANGED | {"diag", "diagonal", "__getitem__"}


_EXTREMES = {"max": "max", "amax": "max", "any": "max", "min": "min", "amin": "min", "all": "min"}


def _maker(value: int, graph: StepGraph) -> Node | None:
    """The operation that has made a value, behind those that return it as it is."""
    node = graph.makers.get(value)
    while node is not None and node.name in IDENTITIES and len(node.inputs) == 1:
        node = graph.makers.get(node.inputs[0])
    return node


def is_extreme(value: int, graph: StepGraph) -> bool:
    """Whether a scalar is the largest or least of others, also of such as are of no sample: no mean by itself."""
    node = _maker(value, graph)
    return node is not None and node.name in _EXTREMES


def reduction_of(value: int, graph: StepGraph, size: int) -> str:
    """How a scalar reduces over the samples of a microbatch: "sum", "max", "min"; "" if not by one such operation."""
    node = _maker(value, graph)
    if node is None or node.unit or not node.inputs:
        return ""
    if len(node.inputs) > 1 and node.averages != "sum":  # a loss may compare two values of the model
        return ""
    shape = graph.values[node.inputs[0]].shape
    if not size or not shape or shape[0] % size or node.inputs[0] not in graph.of_samples - graph.mixed:
        return ""  # of parameters or scalars alone, or of more than a row's sample
    return "sum" if node.name in SUMS or node.averages == "sum" else _EXTREMES.get(node.name, "")


def matching_values(local: StepGraph, full: StepGraph) -> dict[int, int]:
    """Map the values of a step on the full batch to the values of the step on a microbatch.

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
        if node.unit or node.parameters or not node.inputs:
            return False
        if node.name in _CONTRACTIONS or node.averages == "sum":
            return all(has_samples(one) for one in node.inputs)
        if node.name not in _ADDED | _REARRANGED | IDENTITIES | SCALED or not all(map(is_total, node.inputs)):
            return False
        if node.name in SCALED and node.averages:
            return False
        if node.name in _ADDED:
            return len(node.inputs) > 1  # otherwise the other term is no value of the model
        if node.name in _REARRANGED and len(node.inputs) > 1:
            sizes = [math.prod(full.values[one].shape) for one in node.inputs]
            return sum(sizes) == math.prod(full.values[made].shape)  # otherwise it contains other terms
        return len(node.inputs) == 1 or node.name in _REARRANGED

    return is_total(value)


_BY_CLASS = frozenset({"cross_entropy", "nll_loss"})
_BY_ELEMENT = frozenset(
    {"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits"}
    | {"kl_div", "poisson_nll_loss", "gaussian_nll_loss", "soft_margin_loss"}
)
DIVISIONS = frozenset({"div", "divide", "true_divide", "__truediv__"})
PRODUCTS = DIVISIONS | {"mul", "multiply", "__mul__", "__rmul__"}
_PICKS = frozenset({"__getitem__", "masked_select"})


class Share(NamedTuple):
    """The weight of a mean over a microbatch in that over the batch."""

    factor: float  # factor of its value
    divisor: float  # divisor of its sum


def averages(name: str, args: Any, kwargs: Any, is_model: Callable[[Any], bool], *, numbers_read: bool) -> Averages:
    """Classify what an operation of a step averages over.

    ``is_model`` tells values of the model from those of the batch; ``numbers_read``, whether the step has read numbers
    from the batch, which may be among the arguments.
    """
    if name in _BY_CLASS | _BY_ELEMENT:
        bound = _bound(name, args, kwargs)
        if bound is None or not isinstance(bound["target"], Tensor):
            return ""
        if is_model(bound["target"]):
            return "sum" if bound["reduction"] == "sum" else ""
        by_class = "classes" if bound.get("weight") is None else "weighted"
        how = {"mean": by_class if name in _BY_CLASS else "elements", "sum": "sum"}
        return how.get(bound["reduction"], "")  # type: ignore[return-value]
    if name == "mean" and len(args) == 1 and not kwargs:
        return "rows"
    if name == "__rtruediv__" or (name in DIVISIONS and len(args) == 2 and is_model(args[1])):
        return "inverse"
    if name in PRODUCTS and len(args) == 2 and not kwargs:
        made = [arg for arg in args if not is_model(arg) and (isinstance(arg, Tensor) or numbers_read)]
        if made:
            return "divisor" if name in DIVISIONS else "product"
    return ""


def picked_rows(name: str, args: Any, kwargs: Any, is_model: Callable[[Any], bool]) -> Tensor | None:
    """The number of rows, a scalar, that an operation selects by a boolean mask of the batch; None for others."""
    if name not in _PICKS:
        return None
    masks = [leaf for leaf in flatten((args[1:], kwargs))[0] if isinstance(leaf, Tensor) and leaf.dtype is torch.bool]
    return masks[0].sum() if len(masks) == 1 and not is_model(masks[0]) else None


def count(how: Averages, name: str, args: Any, kwargs: Any, is_model: Callable[[Any], bool]) -> Tensor | float | None:
    """The denominator, a scalar, of a mean in one microbatch; for a product its other factor, of one element.

    ``how`` is the result of ``averages``, and the other arguments are as there.
    """
    if how in ("divisor", "product"):
        made = [arg for arg in args if not is_model(arg)]
        return made[0] if len(made) == 1 and _is_number(made[0]) else None
    bound = _bound(name, args, kwargs)
    if bound is None:
        return None
    target: Tensor = bound["target"]
    if how == "elements":
        return target.numel()
    if target.is_floating_point():  # probabilities of all classes
        return target.numel() // target.shape[-1 if target.dim() == 1 else 1]
    kept = target != bound["ignore_index"]
    weight = bound["weight"]
    return kept.sum() if weight is None else weight.detach()[target[kept]].double().sum()


def labels_of(name: str, args: Any, kwargs: Any) -> tuple[Tensor, int] | None:
    """The labels of an unweighted mean over class labels, of shape (N,) or (N, d1, ..., dk), and the ignored label.

    None for other means.
    """
    bound = _bound(name, args, kwargs) if name in _BY_CLASS else None
    if bound is None or bound["weight"] is not None or bound["target"].is_floating_point():
        return None
    return bound["target"], bound["ignore_index"]


def weighted_by_share(name: str, how: Averages, run: Callable[..., Any], share: Share) -> Callable[..., Any]:
    """Wrap an operation that averages, by ``how``, to weight its result by the share of a microbatch.

    With a count of 0 (0 / 0) it is an empty sum.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        if how == "divisor":
            return args[0] / share.divisor
        if share.factor:
            return run(*args, **kwargs) * share.factor
        if how == "rows":
            return args[0].sum()
        bound = _bound(name, args, kwargs)
        assert bound is not None
        return getattr(F, name)(**{**bound, "reduction": "sum"})

    return call


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)


def _bound(name: str, args: Any, kwargs: Any) -> dict[str, Any] | None:
    """The arguments of a loss function by name; None if deprecated ones are used."""
    bound = _signature(name).bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = dict(bound.arguments)
    if arguments.pop("size_average", None) is not None or arguments.pop("reduce", None) is not None:
        return None
    return arguments


@cache
def _signature(name: str) -> inspect.Signature:
    return inspect.signature(getattr(F, name))


_PRODUCTS = PRODUCTS | {"mul_", "__imul__"}
_LINEAR = (
    IDENTITIES
    | _REARRANGED
    | {"add", "__add__", "__radd__", "sub", "__sub__", "__rsub__", "neg", "__neg__", "sum", "mean", "add_", "__iadd__"}
    | _PRODUCTS
    | {"unbind", "item"}
)


def data_dependent_means(graph: StepGraph, *, sizes_differ: bool) -> frozenset[int]:
    """Indices of the nodes that average over a number of entries that depends on the content of the batch.

    ``sizes_differ`` tells that the graph of another microbatch has other shapes than this ``graph``.
    """
    found = set()
    for node in graph.nodes:
        dynamic = sizes_differ or any(graph.values[value].dynamic for value in node.inputs)
        by_content = node.averages in ("classes", "weighted", "divisor")
        averages = by_content or (node.averages in ("elements", "rows") and dynamic)
        if averages and len(node.outputs) == 1 and not node.written and _is_linear(node, graph):
            found.add(node.index)
    return frozenset(found)


def is_linear(node: Node) -> bool:
    """Whether the result of an operation is linear in all of its inputs."""
    return node.name in _LINEAR and node.averages != "inverse" and (node.name not in _PRODUCTS or len(node.inputs) == 1)


def leads_to_loss(index: int, graph: StepGraph) -> bool:
    """Whether the loss depends on the result of an operation."""
    return graph.loss is None or index in _ancestors(graph.loss, graph)


def reached_by(index: int, graph: StepGraph) -> set[int]:
    """Indices of the operations that depend on one, and on which the loss depends if there is one."""
    behind = set(range(len(graph.nodes))) if graph.loss is None else _ancestors(graph.loss, graph)
    values = set(graph.nodes[index].outputs)
    reached = set()
    for node in graph.nodes[index + 1 :]:
        if not values.isdisjoint(node.inputs):
            reached.add(node.index)
            values.update(node.outputs)
    return reached & behind


def _is_linear(term: Node, graph: StepGraph) -> bool:
    """Whether all operations from a term to the loss are linear in it."""
    if graph.loss is None:
        return True
    behind = _ancestors(graph.loss, graph)
    of_term = set(term.outputs)
    for node in graph.nodes[term.index + 1 :]:
        if node.index not in behind or of_term.isdisjoint(node.inputs):
            continue
        if node.name not in _LINEAR or (node.averages == "inverse" and len(node.inputs) == 1):
            return False
        factors = [value for value in node.inputs if value in of_term]
        others = [value for value in node.inputs if value not in of_term]
        if node.name in _PRODUCTS and (len(factors) != 1 or any(_may_differ(value, graph) for value in others)):
            return False
        if node.name in DIVISIONS and node.inputs[0] not in of_term:
            return False
        of_term.update(node.outputs)
    return True


def _ancestors(value: int, graph: StepGraph) -> set[int]:
    """Indices of the operations from which a value is computed."""
    wanted, found = {value}, set()
    for node in reversed(graph.nodes):
        if not wanted.isdisjoint(node.outputs):
            found.add(node.index)
            wanted.update((*node.inputs, *node.reads))
    return found


def _may_differ(value: int, graph: StepGraph) -> bool:
    """Whether a value may differ between microbatches: it depends on the output of a layer."""
    return any(graph.nodes[index].unit for index in _ancestors(value, graph))
