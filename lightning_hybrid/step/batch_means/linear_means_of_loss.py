"""The means on which a loss depends linearly: these are weighted by the count of their microbatch."""

from __future__ import annotations

from lightning_hybrid.graph.step_graph import Node, StepGraph
from lightning_hybrid.step.batch_means.mean_ops_and_denominators import DIVISIONS, PRODUCTS
from lightning_hybrid.step.batch_means.recognise_sums_over_samples import IDENTITIES, REARRANGED

_PRODUCTS = PRODUCTS | {"mul_", "__imul__"}
_LINEAR = (
    IDENTITIES
    | REARRANGED
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
        averages = node.averages in ("classes", "divisor") or (node.averages in ("elements", "rows") and dynamic)
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
    return any(graph.nodes[index].unit is not None for index in _ancestors(value, graph))
