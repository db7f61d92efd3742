"""What a layer keeps of its parameters for the backward, while they are freed: only where it lies in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_hybrid.zero.parameter_group import ParameterGroup


class Place(NamedTuple):
    """Where a tensor that a backward needs lies in the whole of a parameter."""

    group: ParameterGroup
    name: str
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any


def pack(groups: Sequence[ParameterGroup], tensor: Tensor) -> Tensor | Place:
    """What is kept for the backward: of a parameter only its place."""
    if type(tensor) in (Tensor, nn.Parameter):
        for group in groups:
            name = group.name_of(tensor.untyped_storage())
            if name is not None and tensor.dtype == group.parameters[name].dtype:
                return Place(group, name, tensor.size(), tensor.stride(), tensor.storage_offset())
    return tensor
