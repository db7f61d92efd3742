"""The signature of an operation, by which two runs of a step are compared."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_DESCRIBED = (bool, str, type(None), torch.dtype, torch.device)


def asked_of(
    name: str, leaves: Sequence[Any], mark_of: Callable[[Tensor], int | None], parameters: Mapping[int, str]
) -> tuple[Hashable, Hashable]:
    """What an operation is asked to do, and the sizes that it is given: whole numbers, shapes of the batch's tensors.

    Args:
        name: Of the operation.
        leaves: Of its arguments.
        mark_of: The value that a tensor is.
        parameters: FQN by id.
    """
    asked: list[Hashable] = [name]
    sizes: list[Hashable] = []
    is_unit = name.startswith("@")
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            mark = mark_of(leaf)
            if mark is not None:
                asked.append(mark)
            elif id(leaf) in parameters:
                asked.append(parameters[id(leaf)])
            else:
                asked.append((leaf.dtype, leaf.dim(), leaf.requires_grad))
                sizes.append(tuple(leaf.shape))
        elif isinstance(leaf, _DESCRIBED):
            asked.append((type(leaf), leaf))
        else:
            asked.append("int" if isinstance(leaf, int) else type(leaf).__name__)
            if isinstance(leaf, int) and not is_unit:
                sizes.append(int.__index__(leaf))
    return tuple(asked), tuple(sizes)


def picks_rows(name: str, args: Sequence[Any]) -> bool:
    """Whether an operation picks rows of the first dimension by their numbers: one of them, or a slice.

    Args:
        name: Of the operation.
        args: Its arguments.
    """
    if name != "__getitem__":
        return False
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    plain = all(entry is None or entry is ... or type(entry) in (int, slice) for entry in index)
    first = index[0] if plain and index else None
    return type(first) is int or (isinstance(first, slice) and first != slice(None))
