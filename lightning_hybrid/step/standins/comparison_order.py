"""One order for the operands of a comparison, however Python came to them.

Of ``a <= b`` Python asks ``b >= a`` first where the class of ``b`` is derived from that of ``a``; stand-ins are of a
derived class. So what is ``le`` where both are there is ``ge`` where ``b`` is absent: in a recording, or on another
stage.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor

# By the name that a torch function mode sees: the same with its arguments exchanged.
_EXCHANGED: dict[str, tuple[str, Callable[..., Any]]] = {
    "lt": ("gt", torch.gt),
    "le": ("ge", torch.ge),
    "gt": ("lt", torch.lt),
    "ge": ("le", torch.le),
    "ne": ("ne", torch.ne),
    "eq": ("eq", torch.eq),
    "__eq__": ("__eq__", Tensor.__eq__),
}


def in_order(
    name: str, func: Callable[..., Any], args: Any, mark_of: Callable[[Tensor], int | None], parameters: Container[int]
) -> tuple[str, Callable[..., Any], Any]:
    """A comparison with values of the step first, by their number, then parameters, then what is of the batch.

    Args:
        name: Of an operation.
        func: The operation.
        args: Its arguments.
        mark_of: Which value of the step a tensor is.
        parameters: Holds the ``id`` of parameters and tracked buffers.

    Returns:
        What to do instead: another name, function and order of arguments, or the same.
    """

    def rank(tensor: Tensor) -> tuple[int, int]:
        mark = mark_of(tensor)
        return (0, mark) if mark is not None else (1 if id(tensor) in parameters else 2, 0)

    if len(args) != 2 or not isinstance(args[0], Tensor) or not isinstance(args[1], Tensor):
        return name, func, args
    if rank(args[0]) <= rank(args[1]):
        return name, func, args
    return *_EXCHANGED[name], (args[1], args[0])


COMPARISONS = frozenset(_EXCHANGED)
