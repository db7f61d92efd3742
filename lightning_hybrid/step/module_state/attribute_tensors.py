"""Attribute tensors: values that code around a unit sets on its modules, such as a normed weight.

``torch.nn.utils.weight_norm`` is the best known: a hook computes the weight before each forward and sets it as a plain
attribute. ``torch.func.functional_call`` puts other tensors in the place of parameters for one call. To the step graph
such a value is an input of the unit like its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from lightning_hybrid.step.module_state.snapshot import Place, reachable
from lightning_hybrid.step.standins.absent_tensors import is_absent


def held_tensors(unit: nn.Module) -> Iterator[tuple[Place, Tensor]]:
    """Each tensor that the modules of a unit hold beside their parameters, and where (modules named from the unit)."""
    for place, leaf in reachable(unit, plain=False):
        if isinstance(leaf, Tensor):
            yield place, leaf
    for name, module in unit.named_modules():
        for member, buffer in module._buffers.items():
            if buffer is not None:
                yield Place(name, member, ()), buffer


def found_on(
    unit: nn.Module, mark_of: Callable[[Tensor], int | None], parameters: Mapping[int, str], owned: Collection[str]
) -> list[tuple[Place, Tensor]]:
    """The values that a unit finds on its own modules, and what it was given in the place of its parameters.

    Args:
        unit: About to run.
        mark_of: The index of a value; None for other tensors.
        parameters: FQN by id.
        owned: FQNs of the unit's own.
    """
    slots = (
        (Place(name, member, ()), tensor)
        for name, module in unit.named_modules()
        for member, tensor in module._parameters.items()
    )
    given = [
        (place, tensor) for place, tensor in slots if tensor is not None and parameters.get(id(tensor)) not in owned
    ]
    return [(place, tensor) for place, tensor in held_tensors(unit) if mark_of(tensor) is not None] + given


def is_given_parameters(unit: nn.Module, places: Sequence[Place]) -> bool:
    """Whether one of these places is that of a parameter."""
    return any(place.attribute in unit.get_submodule(place.module)._parameters for place in places)


def look_up(unit: nn.Module, places: Sequence[Place]) -> list[Any]:
    """What is at these places now; None where nothing is."""
    found: list[Any] = []
    for place in places:
        holder, key = _holder(unit, place)
        try:
            found.append(None if holder is None else holder[key])
        except (KeyError, IndexError):
            found.append(None)
    return found


def put(unit: nn.Module, places: Sequence[Place], tensors: Sequence[Any]) -> None:
    """Put tensors at places where others were found."""
    for place, tensor in zip(places, tensors, strict=True):
        holder, key = _holder(unit, place)
        holder[key] = tensor


def _holder(unit: nn.Module, place: Place) -> tuple[Any, Any]:
    """The container that a place is an entry of, and the entry's key."""
    module = unit.get_submodule(place.module)
    holder: Any = next((m for m in (module._buffers, module._parameters) if place.attribute in m), module.__dict__)
    keys = (place.attribute, *place.path)
    for key in keys[:-1]:
        try:
            value = holder[key]
        except (KeyError, IndexError, TypeError):
            return None, None
        holder = value if isinstance(value, list | dict) else getattr(value, "__dict__", None)
    return holder, keys[-1]


def _computed_weights(root: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    for name, module in root.named_modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, WeightNorm | SpectralNorm):
                yield name, module, hook


def computed_weights(root: nn.Module) -> set[Place]:
    """Where weights are that a hook of torch's computes before each forward: nobody waits for them after a step."""
    return {Place(name, hook.name, ()) for name, _, hook in _computed_weights(root)}


def compute_weights(root: nn.Module) -> None:
    """Compute such weights where they are absent though what they come from is here."""
    for _, module, hook in _computed_weights(root):
        if is_absent(module.__dict__.get(hook.name)):
            with torch.no_grad():
                options = {"do_power_iteration": False} if isinstance(hook, SpectralNorm) else {}
                setattr(module, hook.name, hook.compute_weight(module, **options))
