"""A canonical operand order for comparisons, whichever reflected method Python called.

For ``a <= b`` Python calls ``b >= a`` first where the class of ``b`` is derived from that of ``a``; stand-ins are of a
derived class. So ``le`` of two present tensors is ``ge`` where ``b`` is absent: in a recording, or on another stage.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor

# By the name that a torch function mode intercepts: the equivalent function for swapped arguments.
_SWAPPED: dict[str, tuple[str, Callable[..., Any]]] = {
    "lt": ("gt", torch.gt),
    "le": ("ge", torch.ge),
    "gt": ("lt", torch.lt),
    "ge": ("le", torch.le),
    "ne": ("ne", torch.ne),
    "eq": ("eq", torch.eq),
    "__eq__": ("__eq__", Tensor.__eq__),
}


def in_canonical_order(
    name: str, func: Callable[..., Any], args: Any, mark_of: Callable[[Tensor], int | None], parameters: Container[int]
) -> tuple[str, Callable[..., Any], Any]:
    """The equivalent comparison with sorted operands: values of the step by index, then parameters, then batch tensors.

    Args:
        name: The operation's name.
        func: The operation.
        args: Its arguments, tensors of any shapes.
        mark_of: Gives the index of the value that a tensor is.
        parameters: The ``id`` of each parameter and tracked buffer.
    """

    def _rank(tensor: Tensor) -> tuple[int, int]:
        mark = mark_of(tensor)
        return (0, mark) if mark is not None else (1 if id(tensor) in parameters else 2, 0)

    if len(args) != 2 or not isinstance(args[0], Tensor) or not isinstance(args[1], Tensor):
        return name, func, args
    if _rank(args[0]) <= _rank(args[1]):
        return name, func, args
    return *_SWAPPED[name], (args[1], args[0])


COMPARISONS = frozenset(_SWAPPED)
