"""Derivatives inside a step: what ``torch.autograd.grad`` goes back through stays on one stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_hybrid.graph.step_graph import Node
from lightning_hybrid.step.objects.pytree import flatten


class GraphWanted(BaseException):
    """A recording needs autograd's whole graph, but took the results of like units from one another."""


def is_derivative(name: str) -> bool:
    """Whether an operation is ``torch.autograd.grad``."""
    return name == "grad"


def gone_through(
    nodes: Sequence[Node],
    made: Sequence[Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    mark_of: Callable[[Tensor], int | None],
    parameters: Mapping[int, str],
) -> tuple[int, ...]:
    """The nodes that a call of ``torch.autograd.grad`` goes back through.

    Args:
        nodes: So far.
        made: What each of them returned.
        args: Of the call.
        kwargs: Likewise.
        mark_of: The value that a tensor is, None if it is of the batch.
        parameters: FQN by id.
    """
    outputs = [o for o in flatten(args[0] if args else kwargs["outputs"])[0] if isinstance(o, Tensor)]
    inputs = flatten(args[1] if len(args) > 1 else kwargs["inputs"])[0]
    by = [leaf for leaf in inputs if isinstance(leaf, Tensor)]
    marks = [mark for leaf in outputs if (mark := mark_of(leaf)) is not None]
    values = {id(leaf): mark_of(leaf) for leaf in by if id(leaf) not in parameters}
    found = set(
        between(
            nodes,
            marks,
            [value for value in values.values() if value is not None],
            [parameters[id(leaf)] for leaf in by if id(leaf) in parameters],
        )
    )
    of_batch = [leaf for leaf in by if id(leaf) in values and values[id(leaf)] is None]
    if of_batch:  # no value of the graph: autograd knows which nodes have read them, in whatever way
        before = between(nodes, marks, None, ())
        found.update(_leading_to(of_batch, outputs, [(nodes[index], made[index]) for index in before], mark_of))
    return tuple(sorted(found))


def _leading_to(
    leaves: Sequence[Tensor],
    outputs: Sequence[Tensor],
    before: Sequence[tuple[Node, Any]],
    mark_of: Callable[[Tensor], int | None],
) -> list[int]:
    """Those of the nodes before some outputs whose results depend on a leaf, or are not known not to."""
    reaching, visited = _reaching(leaves, outputs)
    found = []
    for node, out in before:
        tensors = [leaf for leaf in flatten(out)[0] if isinstance(leaf, Tensor)]
        if any(tensor.requires_grad and tensor.grad_fn is None for tensor in tensors):
            return [node.index for node, _ in before]  # autograd's graph is interrupted here
        written = not set(node.outputs).issubset(mark_of(tensor) for tensor in tensors)
        unknown = any(t.requires_grad and (t.grad_fn not in visited or t.grad_fn in reaching) for t in tensors)
        if written or unknown:
            found.append(node.index)
    return found


def _reaching(leaves: Sequence[Tensor], outputs: Sequence[Tensor]) -> tuple[set[Any], set[Any]]:
    """Of the functions of autograd that some outputs come from, those that depend on a leaf, and all."""
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
    for function in order:  # those before it have come already
        is_end = function in ends or id(getattr(function, "variable", None)) in variables
        if is_end or any(earlier in reaching for earlier, _ in function.next_functions):
            reaching.add(function)
    return reaching, visited


def between(
    nodes: Sequence[Node], outputs: Iterable[int], inputs: Iterable[int] | None, parameters: Iterable[str]
) -> tuple[int, ...]:
    """The nodes through which a derivative of some values by others goes.

    Args:
        nodes: So far.
        outputs: Values that are differentiated.
        inputs: Values by which; None if by tensors of the batch, which any node may have read.
        parameters: Parameters by which.
    """
    needed, ancestors = set(outputs), []
    for node in reversed(nodes):
        if needed.intersection(node.outputs):
            needed.update(node.inputs)
            ancestors.append(node)
    if inputs is None:
        return tuple(node.index for node in reversed(ancestors))
    reached, by, found = set(inputs), set(parameters), []
    for node in reversed(ancestors):
        if reached.intersection(node.inputs) or by.intersection(node.parameters):
            reached.update(node.outputs)
            found.append(node.index)
    return tuple(found)
