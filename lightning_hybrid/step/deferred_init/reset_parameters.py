"""Initialisation by ``reset_parameters`` of modules that user code built on the meta device.

The operations on their parameters were not recorded, so each module's own ``reset_parameters`` is called again,
children before their parent, in order of definition. Then, where a module defines ``_init_weights`` (the idiom
``self.apply(self._init_weights)``), it is called on each of them below that module and not below a nearer one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

# The second is the name in torch's attention and transformer.
_RESETS = ("reset_parameters", "_reset_parameters")


def reset(root: nn.Module, modules: set[nn.Module]) -> None:
    """Initialise the modules below ``root`` whose direct parameters or buffers have no values."""
    seen: set[nn.Module] = set()

    def walk(module: nn.Module) -> Iterator[nn.Module]:
        if module in seen:
            return
        seen.add(module)
        below = [inner for child in module.children() for inner in walk(child)]
        if module in modules:
            initialise = _without_arguments(module, _RESETS)
            if initialise is not None:
                initialise()
            below.append(module)
        if below and (init_all := _without_arguments(module, ("_init_weights",))) is not None:
            init_all()
        elif (init_one := getattr(module, "_init_weights", None)) is not None and callable(init_one):
            for inner in below:
                init_one(inner)
        else:
            yield from below

    for _ in walk(root):
        pass


def _without_arguments(module: nn.Module, names: tuple[str, ...]) -> Callable[[], Any] | None:
    for name in names:
        method = getattr(module, name, None)
        if callable(method):
            takes = inspect.signature(method).parameters.values()
            if all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in takes):
                return method
    return None
