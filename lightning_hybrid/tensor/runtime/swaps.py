"""Tensors, attributes and forwards that the modules of a unit have for one forward, and what restores their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from lightning_hybrid.patching import Replacement
from lightning_hybrid.randomness.keyed import FORWARD_WRAPPER

Slot = tuple[dict[str, Tensor | None], str]  # a module's parameters or buffers, and the key in them
Modules = Mapping[str, nn.Module]
_NOTHING = object()


class Swaps:
    """A context that restores the entries that were put into dicts inside. It is entered for every forward."""

    def __init__(self) -> None:
        self._own: list[tuple[dict[str, Any], str, Any]] = []

    def __enter__(self) -> Swaps:
        """Begin without entries."""
        return self

    def put(self, entries: dict[str, Any], name: str, value: Any) -> None:
        """Put a value in the place of another one, or of none."""
        self._own.append((entries, name, entries.get(name, _NOTHING)))
        entries[name] = value

    def __exit__(self, *_: object) -> None:
        """Restore the previous entries."""
        for entries, name, own in reversed(self._own):
            if own is _NOTHING:
                entries.pop(name, None)
            else:
                entries[name] = own


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


def put_tensors(slots: Mapping[str, list[Slot]], tensors: Mapping[str, Tensor], swaps: Swaps) -> None:
    """Puts tensors, of any shape, into their slots, by FQN."""
    for fqn, tensor in tensors.items():
        for members, name in slots[fqn]:
            if members[name] is not tensor:
                swaps.put(members, name, tensor)


def find_attributes(modules: Modules, values: Mapping[str, Mapping[str, int]]) -> list[tuple[dict[str, Any], str, int]]:
    """Finds the attributes of modules that have other values, given by FQN and name, while the unit runs sharded."""
    found = [(modules[fqn].__dict__, name, value) for fqn, named in values.items() for name, value in named.items()]
    # Torch's encoder layer bypasses the attention's forward and reads its weights in eval mode, unless this is 0.
    layers = [module for module in modules.values() if isinstance(module, nn.TransformerEncoderLayer)]
    return found + [(layer.__dict__, "activation_relu_or_gelu", 0) for layer in layers]


def put_forwards(modules: Modules, forwards: Mapping[str, Callable[..., Any]], swaps: Swaps) -> None:
    """Replaces forwards of modules, by FQN, except the unit's own."""
    for fqn, forward in forwards.items():
        if fqn:
            attributes = modules[fqn].__dict__
            own = attributes.get("forward")
            around = getattr(own, FORWARD_WRAPPER, None)  # keys the random numbers of the module
            if around is not None:
                forward = Replacement(modules[fqn], "forward", around(forward), own, reason="parallel linears")
            swaps.put(attributes, "forward", forward)  # the same object each time: compiled code is guarded by it
