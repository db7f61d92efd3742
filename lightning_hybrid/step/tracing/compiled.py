"""Modules that users compile themselves: layers run compiled, code around units runs eagerly.

The compiler traces into everything that is called, so around units it would trace the function mode of the step, and
compile again for each microbatch. Code inside a unit is not intercepted, so it may be compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

import torch
from torch import nn

from lightning_hybrid.patching import replaced_forwards

_ORIGINAL = "_torchdynamo_orig_callable"  # attribute of a compiled function


class EagerSwitch:
    """A switch: while it is on, ``torch.compile`` compiles nothing and compiled functions run eagerly."""

    def __init__(self) -> None:
        self._stance: Any = None
        self._is_on = False

    def on(self) -> None:
        """Switch on; the stance before the first call is the one restored by ``off``."""
        if self._stance is None:
            self._stance = torch.compiler.set_stance("force_eager")
        else:
            self._stance.__enter__()
        self._is_on = True

    def off(self) -> None:
        """Switch off and restore the previous stance."""
        self._stance.__exit__(None, None, None)
        self._is_on = False

    def pause(self) -> None:
        """Allow compiled code until ``resume``, if it is on."""
        if self._is_on:
            self._stance.__exit__(None, None, None)

    def resume(self) -> None:
        """End a pause."""
        if self._is_on:
            self._stance.__enter__()


def compiled_forward(module: nn.Module, original: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a unit, compiled if the unit was compiled in place (``layer.compile()``).

    Such a module is compiled around its forward, where the unit has not been entered yet; so the compiled call is made
    from inside its forward. Modules with hooks run eagerly, since their hooks are called outside.
    """
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    compiled = module._compiled_call_impl
    if compiled is None or any(hooks):
        return original

    def run(*args: Any, **kwargs: Any) -> Any:
        with replaced_forwards({"": module}, lambda fqn, watched: original, reason="runs a compiled module"):
            return compiled(*args, **kwargs)

    return run


def compiled_wrappers(root: nn.Module, units: Iterable[nn.Module]) -> dict[str, nn.Module]:
    """The modules, by FQN, that the user compiled and that contain a unit."""
    unit_ids = {id(unit) for unit in units}
    return {
        fqn: module
        for fqn, module in root.named_modules()
        if _is_compiled(module) and any(id(inner) in unit_ids for inner in module.modules() if inner is not module)
    }


def has_compiled_methods(root: nn.Module) -> bool:
    """Whether a method of a module is a function that the user compiled, which may call any layer."""
    modules = list(root.modules())
    classes = {owner for kind in set(map(type, modules)) for owner in kind.__mro__}
    of_instances = [original for module in modules for original in _compiled_functions(module)]
    return any(map(_compiled_functions, classes)) or any(
        isinstance(getattr(original, "__self__", None), nn.Module) for original in of_instances
    )


def _compiled_functions(owner: Any) -> list[Any]:
    """What the user compiled to functions that are attributes of a class or an object."""
    functions = (vars(value) for value in vars(owner).values() if isinstance(value, FunctionType))
    return [each[_ORIGINAL] for each in functions if each.get(_ORIGINAL) is not None]


def compiled_modules(root: nn.Module, units: Iterable[nn.Module] = ()) -> set[int]:
    """The ids of modules that run inside a module that the user compiled; around ``units`` modules run uncompiled."""
    around = {id(module) for module in compiled_wrappers(root, units).values()}
    tops = [module for module in root.modules() if _is_compiled(module) and id(module) not in around]
    return {id(module) for top in tops for module in top.modules()}


def _is_compiled(module: nn.Module) -> bool:
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None
