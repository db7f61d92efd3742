"""Derivatives inside a step: the nodes that ``torch.autograd.grad`` differentiates through stay on one stage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_hybrid.graph.step_graph import Node
from lightning_hybrid.step.objects.pytree import flatten
from lightning_hybrid.step.standins.marks import Marks


class FullGraphNeeded(BaseException):
    """A recording needs autograd's full graph, but reused the results of structurally equal units."""


def nodes_differentiated(
    nodes: Sequence[Node],
    made: Sequence[Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    marks: Marks,
    parameters: Mapping[int, str],
) -> tuple[int, ...]:
    """The nodes that a call of ``torch.autograd.grad``, with tensors of any shapes, differentiates through.

    ``made`` has the output of each of the nodes so far.
    """
    outputs = [o for o in flatten(args[0] if args else kwargs["outputs"])[0] if isinstance(o, Tensor)]
    inputs = flatten(args[1] if len(args) > 1 else kwargs["inputs"])[0]
    variables = [leaf for leaf in inputs if isinstance(leaf, Tensor)]
    ends = marks.among(outputs)
    values = marks.among(leaf for leaf in variables if id(leaf) not in parameters)
    members = [parameters[id(leaf)] for leaf in variables if id(leaf) in parameters]
    found = set(_nodes_between(nodes, ends, values, members))
    of_batch = [leaf for leaf in variables if id(leaf) not in parameters and leaf not in marks]
    if of_batch:  # no values of the graph: autograd's own graph says which nodes have read them
        before = _nodes_between(nodes, ends, None, ())
        found.update(_depending_on(of_batch, outputs, [(nodes[index], made[index]) for index in before], marks))
    return tuple(sorted(found))


def _depending_on(
    leaves: Sequence[Tensor],
    outputs: Sequence[Tensor],
    before: Sequence[tuple[Node, Any]],
    marks: Marks,
) -> list[int]:
    """Indices of the nodes before some outputs whose results depend on a leaf, or may depend on one."""
    reaching, visited = _autograd_functions(leaves, outputs)
    found = []
    for node, out in before:
        tensors = [leaf for leaf in flatten(out)[0] if isinstance(leaf, Tensor)]
        if any(tensor.requires_grad and tensor.grad_fn is None for tensor in tensors):
            return [node.index for node, _ in before]  # autograd's graph is interrupted here
        written = not set(node.outputs).issubset(marks.of(tensor) for tensor in tensors)
        unknown = any(t.requires_grad and (t.grad_fn not in visited or t.grad_fn in reaching) for t in tensors)
        if written or unknown:
            found.append(node.index)
    return found


def _autograd_functions(leaves: Sequence[Tensor], outputs: Sequence[Tensor]) -> tuple[set[Any], set[Any]]:
    """The autograd functions behind some outputs: the ones that depend on a leaf, and all of them."""
    ends = {leaf.grad_fn for leaf in leaves if leaf.grad_fn is not None}
    variables = {id(leaf) for leaf in leaves if leaf.grad_fn is None}
    order: list[Any] = []
    visited: set[Any] = set()
    stack = [(output.grad_fn, False) for output in outputs if output.grad_fn is not None]
    while stack:
        function, is_done = stack.pop()
        if is_done:
            order.append(function)
        elif function not in visited:
            visited.add(function)
            stack.append((function, True))
            stack += [(earlier, False) for earlier, _ in function.next_functions if earlier is not None]
    reaching: set[Any] = set()
    for function in order:  # in topological order
        is_end = function in ends or id(getattr(function, "variable", None)) in variables
        if is_end or any(earlier in reaching for earlier, _ in function.next_functions):
            reaching.add(function)
    return reaching, visited


def _nodes_between(
    nodes: Sequence[Node], outputs: Iterable[int], inputs: Iterable[int] | None, parameters: Iterable[str]
) -> tuple[int, ...]:
    """The nodes through which the derivative of ``outputs`` with respect to ``inputs`` and ``parameters`` goes.

    ``inputs`` None stands for tensors of the batch, which any node may have read.
    """
    needed, ancestors = set(outputs), []
    for node in reversed(nodes):
        if needed.intersection(node.outputs):
            needed.update(node.inputs)
            ancestors.append(node)
    if inputs is None:
        return tuple(node.index for node in reversed(ancestors))
    reached, variables, found = set(inputs), set(parameters), []
    for node in reversed(ancestors):
        if reached.intersection(node.inputs) or variables.intersection(node.parameters):
            reached.update(node.outputs)
            found.append(node.index)
    return tuple(found)
