"""Members of modules swapped for one forward, and put back by a stack."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from lightning_hybrid.patching import replace
from lightning_hybrid.randomness.keyed_draws import AROUND

Home = tuple[dict[str, Tensor | None], str]  # what holds a tensor, and its key there
Modules = Mapping[str, nn.Module]


def find_homes(modules: Modules, fqns: Iterable[str]) -> dict[str, list[Home]]:
    """Where each parameter and buffer is held: in one module, or in several that share it.

    Args:
        modules: Of the unit, by FQN.
        fqns: Of the parameters and buffers.
    """
    holders: dict[int, list[Home]] = {}
    held: Any
    for module in modules.values():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                holders.setdefault(id(tensor), []).append((held, name))
    homes = {}
    for fqn in fqns:
        owner, _, name = fqn.rpartition(".")
        module = modules[owner]
        held = module._parameters if name in module._parameters else module._buffers
        homes[fqn] = [(held, name)] if held[name] is None else holders[id(held[name])]
    return homes


def put_tensors(homes: Mapping[str, list[Home]], tensors: Mapping[str, Tensor], undo: ExitStack) -> None:
    """Args: homes: of all. tensors: to put there, by FQN. undo: puts the others back."""
    for fqn, tensor in tensors.items():
        for home, name in homes[fqn]:
            if home[name] is not tensor:
                undo.callback(home.__setitem__, name, home[name])
                home[name] = tensor


def put_attributes(modules: Modules, values: Mapping[str, Mapping[str, int]], undo: ExitStack) -> None:
    """Args: modules: of the unit. values: by FQN and name. undo: puts the others back."""
    for fqn, named in values.items():
        attributes = modules[fqn].__dict__
        for name, value in named.items():
            undo.callback(attributes.__setitem__, name, attributes[name])
            attributes[name] = value


def put_forwards(modules: Modules, forwards: Mapping[str, Callable[..., Any]], undo: ExitStack) -> None:
    """Args: modules: of the unit. forwards: by FQN; that of the unit itself is left alone. undo: puts back."""
    for fqn, forward in forwards.items():
        if fqn:
            attributes = modules[fqn].__dict__
            around = getattr(attributes.get("forward"), AROUND, None)  # keys what the module draws
            if around is not None:
                undo.callback(replace(modules[fqn], "forward", around(forward)))
                continue
            if "forward" in attributes:
                undo.callback(attributes.__setitem__, "forward", attributes["forward"])
            else:
                undo.callback(attributes.__delitem__, "forward")
            attributes["forward"] = forward  # the same object each time: compiled code is guarded by it
    for module in modules.values():
        # Torch's encoder layer reads the weights past the attention's forward in eval mode, unless this is 0.
        if isinstance(module, nn.TransformerEncoderLayer):
            undo.callback(module.__dict__.__setitem__, _FAST_PATH, module.__dict__[_FAST_PATH])
            module.__dict__[_FAST_PATH] = 0


_FAST_PATH = "activation_relu_or_gelu"
