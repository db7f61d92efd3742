"""The signature of an operation, by which two runs of a step are compared."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_COMPARED_BY_VALUE = (bool, str, type(None), torch.dtype, torch.device)


def signature_of(
    name: str, leaves: Sequence[Any], mark_of: Callable[[Tensor], int | None], parameters: Mapping[int, str]
) -> tuple[Hashable, Hashable]:
    """The signature of an operation (name and described arguments), and its sizes (integers, shapes of batch tensors).

    Args:
        name: The operation's name.
        leaves: The leaves of its arguments, tensors of any shapes among them.
        mark_of: Gives the index of the value that a tensor of any shape is.
        parameters: FQN by id.
    """
    signature: list[Hashable] = [name]
    sizes: list[Hashable] = []
    is_unit = name.startswith("@")
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            mark = mark_of(leaf)
            if mark is not None:
                signature.append(mark)
            elif id(leaf) in parameters:
                signature.append(parameters[id(leaf)])
            else:
                signature.append((leaf.dtype, leaf.dim(), leaf.requires_grad))
                sizes.append(tuple(leaf.shape))
        elif isinstance(leaf, _COMPARED_BY_VALUE):
            signature.append((type(leaf), leaf))
        else:
            signature.append("int" if isinstance(leaf, int) else type(leaf).__name__)
            if isinstance(leaf, int) and not is_unit:
                sizes.append(int.__index__(leaf))
    return tuple(signature), tuple(sizes)
