"""Modules that users compile themselves: layers run compiled, code around units as it is written.

A compiler follows Python into all that is called, so around units it would make functions of what watches the step, and
each microbatch would be a new one to it. What is called inside of a unit is seen by nobody else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from lightning_hybrid.randomness.keyed_draws import replaced_forwards


class Uncompiled:
    """While it is on, ``torch.compile`` compiles nothing and compiled functions run as they are written."""

    def __init__(self) -> None:
        """Begin switched off."""
        self._stance: Any = None
        self._is_on = False

    def on(self) -> None:
        """Begin; each time in the stance that there was the first time."""
        if self._stance is None:
            self._stance = torch.compiler.set_stance("force_eager")
        else:
            self._stance.__enter__()
        self._is_on = True

    def off(self) -> None:
        """End it, with what was before."""
        self._stance.__exit__(None, None, None)
        self._is_on = False

    def pause(self) -> None:
        """What is called from now on may be compiled, if it is on."""
        if self._is_on:
            self._stance.__exit__(None, None, None)

    def go_on(self) -> None:
        """End of a pause."""
        if self._is_on:
            self._stance.__enter__()


def compiled_inside(module: nn.Module, original: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a unit, compiled if the unit was compiled in place (``layer.compile()``).

    Such a module is compiled around its forward, where the unit is not entered yet; so it is called once more from
    there, compiled. Modules with hooks run as they are written: their hooks are called outside.

    Args:
        module: The unit.
        original: Its forward.
    """
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    compiled = module._compiled_call_impl
    if compiled is None or any(hooks):
        return original

    def run(*args: Any, **kwargs: Any) -> Any:
        with replaced_forwards({"": module}, lambda fqn, watched: original):
            return compiled(*args, **kwargs)

    return run


def compiled_around(root: nn.Module, units: Iterable[nn.Module]) -> dict[str, nn.Module]:
    """The modules that the user compiled and that hold several units or a part of one, by FQN."""
    whole = {id(unit) for unit in units}
    return {
        fqn: module
        for fqn, module in root.named_modules()
        if _is_compiled(module) and any(id(inner) in whole for inner in module.modules() if inner is not module)
    }


def compiled_modules(root: nn.Module, units: Iterable[nn.Module] = ()) -> set[int]:
    """Ids of modules that run as part of one that the user compiled.

    Args:
        root: Where to look.
        units: If steps are watched, the units: what is compiled around them does not run compiled.
    """
    around = {id(module) for module in compiled_around(root, units).values()}
    tops = [module for module in root.modules() if _is_compiled(module) and id(module) not in around]
    return {id(module) for top in tops for module in top.modules()}


def _is_compiled(module: nn.Module) -> bool:
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None
