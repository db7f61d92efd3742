"""Tensors, attributes and forwards that the modules of a unit have for one forward, and what restores their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from lightning_hybrid.patching import replace
from lightning_hybrid.randomness.keyed import FORWARD_WRAPPER

Slot = tuple[dict[str, Tensor | None], str]  # a module's parameters or buffers, and the key in them
Modules = Mapping[str, nn.Module]


def find_slots(modules: Modules, fqns: Iterable[str]) -> dict[str, list[Slot]]:
    """Finds the slots of each parameter and buffer: one, or several where modules share it."""
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
        undo.callback(attributes.update, {name: attributes[name] for name in named})
        attributes.update(named)


def put_forwards(modules: Modules, forwards: Mapping[str, Callable[..., Any]], undo: ExitStack) -> None:
    """Replaces forwards of modules, by FQN, except the unit's own; ``undo`` restores them."""
    replaced: list[tuple[dict[str, Any], dict[str, Any]]] = []
    undo.callback(_put_forwards_back, replaced)
    for fqn, forward in forwards.items():
        if fqn:
            attributes = modules[fqn].__dict__
            own = {"forward": attributes["forward"]} if "forward" in attributes else {}
            around = getattr(own.get("forward"), FORWARD_WRAPPER, None)  # keys the random numbers of the module
            if around is not None:
                undo.callback(replace(modules[fqn], "forward", around(forward), reason="parallel linears"))
                continue
            replaced.append((attributes, own))
            attributes["forward"] = forward  # the same object each time: compiled code is guarded by it
    for module in modules.values():
        # Torch's encoder layer bypasses the attention's forward and reads its weights in eval mode, unless this is 0.
        if isinstance(module, nn.TransformerEncoderLayer):
            undo.callback(replace(module, "activation_relu_or_gelu", 0, reason="parallel linears"))


def _put_forwards_back(replaced: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """Restores attributes of modules to those with their own forwards, if they had any."""
    for attributes, own in replaced:
        attributes.update(own)
        if not own:
            del attributes["forward"]
