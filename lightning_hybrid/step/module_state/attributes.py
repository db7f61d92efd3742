"""Attribute tensors: values that code around a unit sets on its modules, such as a normalized weight.

``torch.nn.utils.weight_norm`` is the best known: a hook computes the weight before each forward and sets it as a plain
attribute. ``torch.func.functional_call`` substitutes other tensors for parameters during one call. In the step graph
such a value is an input of the unit like its arguments.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from lightning_hybrid.step.module_state.snapshots import AttributePath, reachable_leaves
from lightning_hybrid.step.standins.marks import Marks
from lightning_hybrid.step.standins.tensors import is_absent


def attribute_tensors(unit: nn.Module) -> Iterator[tuple[AttributePath, Tensor]]:
    """The tensors, of any shapes, that the modules of a unit have beside their parameters, with paths from the unit."""
    for place, leaf in reachable_leaves(unit, plain=False):
        if isinstance(leaf, Tensor):
            yield place, leaf
    for name, module in unit.named_modules():
        for member, buffer in module._buffers.items():
            if buffer is not None:
                yield AttributePath(name, member, ()), buffer


def values_on_unit(
    unit: nn.Module, marks: Marks, parameters: Mapping[int, str], owned: Collection[str]
) -> list[tuple[AttributePath, Tensor]]:
    """The values, of any shapes, on the modules of a unit and in place of its parameters, with their paths."""
    slots = (
        (AttributePath(name, member, ()), tensor)
        for name, module in unit.named_modules()
        for member, tensor in module._parameters.items()
    )
    substituted = [
        (place, tensor) for place, tensor in slots if tensor is not None and parameters.get(id(tensor)) not in owned
    ]
    return [(place, tensor) for place, tensor in attribute_tensors(unit) if tensor in marks] + substituted


def replaces_parameters(unit: nn.Module, places: Sequence[AttributePath]) -> bool:
    """Whether one of these paths leads to a parameter."""
    return any(place.attribute in unit.get_submodule(place.module)._parameters for place in places)


def look_up(unit: nn.Module, places: Sequence[AttributePath]) -> list[Any]:
    """The current values at these paths; None where there is none."""
    found: list[Any] = []
    for place in places:
        container, key = _container_and_key(unit, place)
        try:
            found.append(None if container is None else container[key])
        except (KeyError, IndexError):
            found.append(None)
    return found


def put(unit: nn.Module, places: Sequence[AttributePath], tensors: Sequence[Any]) -> None:
    """Store tensors at existing paths."""
    for place, tensor in zip(places, tensors, strict=True):
        container, key = _container_and_key(unit, place)
        container[key] = tensor


def _container_and_key(unit: nn.Module, place: AttributePath) -> tuple[Any, Any]:
    """The container that a path leads into, and the key of the entry."""
    module = unit.get_submodule(place.module)
    container: Any = next((m for m in (module._buffers, module._parameters) if place.attribute in m), module.__dict__)
    keys = (place.attribute, *place.path)
    for key in keys[:-1]:
        try:
            value = container[key]
        except (KeyError, IndexError, TypeError):
            return None, None
        container = value if isinstance(value, list | dict) else getattr(value, "__dict__", None)
    return container, keys[-1]


def _computed_weights(root: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    for name, module in root.named_modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, WeightNorm | SpectralNorm):
                yield name, module, hook


def computed_weights(root: nn.Module) -> set[AttributePath]:
    """Paths of weights that a torch hook computes before each forward: no rank needs them after a step."""
    return {AttributePath(name, hook.name, ()) for name, _, hook in _computed_weights(root)}


def compute_weights(root: nn.Module) -> None:
    """Compute such weights where they are absent but the parameters they are computed from are present."""
    for _, module, hook in _computed_weights(root):
        if is_absent(module.__dict__.get(hook.name)):
            with torch.no_grad():
                options = {"do_power_iteration": False} if isinstance(hook, SpectralNorm) else {}
                setattr(module, hook.name, hook.compute_weight(module, **options))
