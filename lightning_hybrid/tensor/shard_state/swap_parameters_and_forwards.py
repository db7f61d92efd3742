"""Swaps parameters, attributes and forwards of modules for one forward; an exit stack restores them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from lightning_hybrid.patching import replace
from lightning_hybrid.randomness.keyed_draws import FORWARD_WRAPPER

Slot = tuple[dict[str, Tensor | None], str]  # a module's parameters or buffers, and the key in them
Modules = Mapping[str, nn.Module]


def find_slots(modules: Modules, fqns: Iterable[str]) -> dict[str, list[Slot]]:
    """Finds the slots of each parameter and buffer: one, or several where modules share it.

    Args:
        modules: All modules of the unit, by FQN.
        fqns: The names of parameters and buffers.
    """
    by_tensor: dict[int, list[Slot]] = {}
    members: Any
    for module in modules.values():
        for members in (module._parameters, module._buffers):
            for name, tensor in members.items():
                by_tensor.setdefault(id(tensor), []).append((members, name))
    slots = {}
    for fqn in fqns:
        owner, _, name = fqn.rpartition(".")
        module = modules[owner]
        members = module._parameters if name in module._parameters else module._buffers
        slots[fqn] = [(members, name)] if members[name] is None else by_tensor[id(members[name])]
    return slots


def put_tensors(slots: Mapping[str, list[Slot]], tensors: Mapping[str, Tensor], undo: ExitStack) -> None:
    """Puts tensors, of any shape, into their slots, by FQN; ``undo`` restores the previous ones."""
    for fqn, tensor in tensors.items():
        for members, name in slots[fqn]:
            if members[name] is not tensor:
                undo.callback(members.__setitem__, name, members[name])
                members[name] = tensor


def put_attributes(modules: Modules, values: Mapping[str, Mapping[str, int]], undo: ExitStack) -> None:
    """Sets attributes of modules, by FQN and name; ``undo`` restores the previous values."""
    for fqn, named in values.items():
        attributes = modules[fqn].__dict__
        for name, value in named.items():
            undo.callback(attributes.__setitem__, name, attributes[name])
            attributes[name] = value


def put_forwards(modules: Modules, forwards: Mapping[str, Callable[..., Any]], undo: ExitStack) -> None:
    """Replaces forwards of modules, by FQN, except that of the unit itself; ``undo`` restores them."""
    for fqn, forward in forwards.items():
        if fqn:
            attributes = modules[fqn].__dict__
            around = getattr(attributes.get("forward"), FORWARD_WRAPPER, None)  # keys the random numbers of the module
            if around is not None:
                undo.callback(replace(modules[fqn], "forward", around(forward), reason="parallel linears"))
                continue
            if "forward" in attributes:
                undo.callback(attributes.__setitem__, "forward", attributes["forward"])
            else:
                undo.callback(attributes.__delitem__, "forward")
            attributes["forward"] = forward  # the same object each time: compiled code is guarded by it
    for module in modules.values():
        # Torch's encoder layer bypasses the attention's forward and reads its weights in eval mode, unless this is 0.
        if isinstance(module, nn.TransformerEncoderLayer):
            undo.callback(replace(module, "activation_relu_or_gelu", 0, reason="parallel linears"))
