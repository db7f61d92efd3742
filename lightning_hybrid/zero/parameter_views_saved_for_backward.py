"""Tensors that a layer saves for the backward: views of its parameters are saved as offsets, while these are freed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_hybrid.zero.sharded_parameter_group import ParameterGroup


class ParameterView(NamedTuple):
    """A view of a full parameter that a backward needs."""

    group: ParameterGroup
    name: str
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any


def pack(groups: Sequence[ParameterGroup], tensor: Tensor) -> Tensor | ParameterView:
    """Replace a saved tensor that is a view of a parameter by its size and strides; others, of any shape, stay."""
    if type(tensor) in (Tensor, nn.Parameter):
        for group in groups:
            name = group.name_of_storage(tensor.untyped_storage())
            if name is not None and tensor.dtype == group.parameters[name].dtype:
                return ParameterView(group, name, tensor.size(), tensor.stride(), tensor.storage_offset())
    return tensor
