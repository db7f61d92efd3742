"""Copies of a unit of fake tensors, at its own width or divided, and of its arguments.

A tensor is divided along a dim by taking the first of each block of numbers: rank 1 of 2 has the second half of both
the full and the divided one, and the third head has the third block.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_hybrid.equivalence.narrow.sizes_to_divide import Division, owners_of_numbers
from lightning_hybrid.step.objects.deep_copy import copied
from lightning_hybrid.step.standins.absent_tensors import FAKE_MODE

_NONE = Division(1, frozenset())


def copy_of_unit(unit: nn.Module, division: Division = _NONE, *, with_values: bool = False) -> nn.Module:
    """A copy of a unit whose parameters are fake tensors in float64, on the CPU.

    Args:
        unit: The unit; its weights are not read.
        division: The sizes to divide, of parameters, buffers and attributes.
        with_values: Whether buffers have values, as far as those of the unit have; otherwise they are fake too.

    Raises:
        TypeError: A parameter is no plain one.
    """
    memo: dict[int, Any] = {}
    for name, parameter in unit.named_parameters():
        if type(parameter) is not nn.Parameter and not isinstance(parameter, FakeTensor):
            raise TypeError(f"{name} is a {type(parameter).__name__}")
        memo[id(parameter)] = nn.Parameter(_fake(parameter, division), requires_grad=parameter.requires_grad)
    attributes = (value for module in unit.modules() for value in vars(module).values() if isinstance(value, Tensor))
    for tensor in (*unit.buffers(), *attributes):
        if id(tensor) not in memo:
            memo[id(tensor)] = divided(tensor, division) if with_values else _fake(tensor, division)
    shared = {id(owner) for owner in owners_of_numbers(unit)}
    twin: nn.Module = copy.deepcopy(unit, memo)
    for owner in owners_of_numbers(twin):
        if id(owner) in shared and division.sizes:
            raise TypeError("an object with numbers cannot be copied")
        owner.update({name: division.attribute(name, value) for name, value in owner.items()})
    return twin


def divided_leaf(leaf: Any, division: Division, *, with_values: bool) -> Any:
    """An argument of the unit with divided tensors; with `with_values` they keep their values, if they have some."""
    if isinstance(leaf, Tensor):
        tensor = divided(leaf, division) if with_values else _fake(leaf, division)
        return tensor.requires_grad_(leaf.requires_grad)
    return copied(leaf, lambda tensor: divided_leaf(tensor, division, with_values=with_values).detach())


def divided(tensor: Tensor, division: Division) -> Tensor:
    """A tensor of any shape with divided sizes, on the CPU; without values if it has none."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta:
        return _fake(tensor, division)
    value = tensor.detach().to("cpu")
    for dim, length in enumerate(value.shape if value.is_floating_point() else ()):
        if division.of(length) != length:
            value = value.index_select(dim, torch.arange(0, length, division.factor))
    return value.clone() if value.data_ptr() == tensor.data_ptr() else value


def _fake(tensor: Tensor, division: Division) -> Tensor:
    # Numbers that are no widths (indices, masks) keep their sizes.
    shape = division.shape(tensor.shape) if tensor.is_floating_point() else tuple(tensor.shape)
    dtype = torch.float64 if tensor.is_floating_point() else tensor.dtype
    with FAKE_MODE:
        return torch.empty(shape, dtype=dtype)
