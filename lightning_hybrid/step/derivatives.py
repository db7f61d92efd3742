"""Derivatives that the step itself takes: all that ``torch.autograd.grad`` goes back through runs on one stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_hybrid.step.graph import Node
from lightning_hybrid.step.tree import flatten


class GraphWanted(BaseException):
    """A recording needs autograd's whole graph, but took the results of like units from one another."""


def is_derivative(name: str) -> bool:
    """Whether an operation is ``torch.autograd.grad``."""
    return name == "grad"


def gone_through(
    nodes: Sequence[Node],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    mark_of: Callable[[Tensor], int | None],
    parameters: Mapping[int, str],
) -> tuple[int, ...]:
    """The nodes that a call of ``torch.autograd.grad`` goes back through.

    Args:
        nodes: So far.
        args: Of the call.
        kwargs: Likewise.
        mark_of: The value that a tensor is, None if it is of the batch.
        parameters: FQN by id.
    """
    outputs = flatten(args[0] if args else kwargs["outputs"])[0]
    inputs = flatten(args[1] if len(args) > 1 else kwargs["inputs"])[0]
    by = [leaf for leaf in inputs if isinstance(leaf, Tensor)]
    values = [mark_of(leaf) for leaf in by if id(leaf) not in parameters]
    return between(
        nodes,
        [mark for leaf in outputs if isinstance(leaf, Tensor) and (mark := mark_of(leaf)) is not None],
        None if None in values else [value for value in values if value is not None],
        [parameters[id(leaf)] for leaf in by if id(leaf) in parameters],
    )


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
