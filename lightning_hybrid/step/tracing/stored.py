"""Autograd functions called through an ``apply`` that user code stores, as in ``reverse = Reverse.apply``.

Since torch 2.14 such an ``apply`` is a built-in method, whose call runs no Python that one could patch. So its variable
is found, and replaced during a step. In earlier versions each call runs a method written in Python,
wherever the ``apply`` is stored: there is nothing to search for.

A search of all variables of all Python modules takes 20 ms and more per recording. So the variables of a module are
searched once, unless it stores an ``apply``, defines a class of the user's model, or is the main module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import BuiltinMethodType
from typing import Any, NamedTuple

from torch import nn
from torch.autograd import Function

# Whether each call of an autograd function runs a method that is written in Python.
APPLIED_IN_PYTHON = isinstance(vars(Function).get("apply"), classmethod)


class BoundApply(NamedTuple):
    """An attribute in which user code stores the ``apply`` of an autograd function.

    Attributes:
        owner: A Python module, a class or an object.
        name: Name of the attribute.
        function: The autograd function.
    """

    owner: Any
    name: str
    function: type[Function]

    def replacement(self, apply: Callable[..., Any]) -> Any:
        """The attribute value with which ``apply`` is called instead; in a class it must not become a method."""
        return staticmethod(apply) if isinstance(self.owner, type) else apply


def find_bound_applies(root: nn.Module) -> list[BoundApply]:
    """Finds each ``apply`` in variables of Python modules and attributes of modules below ``root`` or their classes."""
    if APPLIED_IN_PYTHON:
        return []
    members = list(root.modules())
    classes = {kind for member in members for kind in type(member).__mro__}
    names = (set(sys.modules) - _searched) | _storing | {kind.__module__ for kind in classes} | {"__main__"}
    _searched.update(names)
    modules = {name: sys.modules[name] for name in names if name in sys.modules and not name.startswith("torch.")}
    of_modules = {name: applies for name, module in modules.items() if (applies := _applies_in(module))}
    _storing.update(of_modules)
    return [bound for applies in (*of_modules.values(), *map(_applies_in, (*members, *classes))) for bound in applies]


# Names of Python modules whose variables were searched, and of those that store an `apply`.
_searched: set[str] = set()
_storing: set[str] = set()


def _applies_in(owner: Any) -> list[BoundApply]:
    return [
        BoundApply(owner, name, function)
        for name, value in list(getattr(owner, "__dict__", {}).items())
        if (function := _function_of_apply(value)) is not None
    ]


def _function_of_apply(value: Any) -> type[Function] | None:
    """The autograd function whose ``apply`` this value is; None for other values."""
    if type(value) is not BuiltinMethodType or value.__name__ != "apply":
        return None
    owner = value.__self__
    return owner if isinstance(owner, type) and issubclass(owner, Function) else None
