"""Autograd functions called by an ``apply`` that user code keeps, as in ``reverse = Reverse.apply``.

Since torch 2.14 such an ``apply`` is a built-in method, which calls no Python on its way. So it is found where it is
kept, and a step finds something else there. Before, each call passed by a method written in Python, wherever the
``apply`` was kept: there is nothing to be found.

Looking at all variables of all Python modules takes 20 ms and more, for each record of a step. So those of a module are
looked at once, unless it keeps an ``apply``, a class of the user's model comes from it, or it is the main one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import BuiltinMethodType
from typing import Any, NamedTuple

from torch import nn
from torch.autograd import Function

# Whether each call of a function passes by a method that is written in Python.
APPLIED_IN_PYTHON = isinstance(vars(Function).get("apply"), classmethod)


class BoundFunction(NamedTuple):
    """Where an ``apply`` is kept.

    Attributes:
        owner: A Python module, a class or an object.
        name: Of its attribute.
        function: Whose ``apply`` it is.
    """

    owner: Any
    name: str
    function: type[Function]

    def calling(self, apply: Callable[..., Any]) -> Any:
        """What to keep there instead, so that ``apply`` is called; in a class it must not become a method."""
        return staticmethod(apply) if isinstance(self.owner, type) else apply


def bound_functions(root: nn.Module) -> list[BoundFunction]:
    """The places at which an ``apply`` is kept: variables of Python modules, attributes of these and of their classes.

    Args:
        root: The user's module.
    """
    if APPLIED_IN_PYTHON:
        return []
    members = list(root.modules())
    classes = {kind for member in members for kind in type(member).__mro__}
    names = (set(sys.modules) - _searched) | _keeping | {kind.__module__ for kind in classes} | {"__main__"}
    _searched.update(names)
    modules = {name: sys.modules[name] for name in names if name in sys.modules and not name.startswith("torch.")}
    of_modules = {name: places for name, module in modules.items() if (places := _kept_by(module))}
    _keeping.update(of_modules)
    return [place for places in (*of_modules.values(), *map(_kept_by, (*members, *classes))) for place in places]


# Names of Python modules whose variables were looked at, and of those that kept an `apply`.
_searched: set[str] = set()
_keeping: set[str] = set()


def _kept_by(owner: Any) -> list[BoundFunction]:
    return [
        BoundFunction(owner, name, function)
        for name, value in list(getattr(owner, "__dict__", {}).items())
        if (function := _applied_by(value)) is not None
    ]


def _applied_by(value: Any) -> type[Function] | None:
    """The function whose ``apply`` a value is; None if it is something else."""
    if type(value) is not BuiltinMethodType or value.__name__ != "apply":
        return None
    owner = value.__self__
    return owner if isinstance(owner, type) and issubclass(owner, Function) else None


def functions(of: type[Function] = Function) -> Iterator[type[Function]]:
    """All autograd functions that exist now."""
    for function in of.__subclasses__():
        yield function
        yield from functions(function)


def unseen_functions() -> Iterator[type[Function]]:
    """The autograd functions whose calls may pass by nothing that is written in Python."""
    return iter(()) if APPLIED_IN_PYTHON else functions()


def users_functions() -> list[type[Function]]:
    """The autograd functions that exist now and are none of torch's or of this package."""
    return [function for function in functions() if not function.__module__.startswith(("torch.", "lightning_hybrid."))]
