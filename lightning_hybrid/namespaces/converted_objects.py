"""Conversion of objects of this package from one of Lightning's namespaces to that of the Trainer that receives them.

A file can import `Hybrid3DStrategy` before it is known which Trainer will receive it. So a Trainer accepts objects of
either namespace: the object is converted to the Trainer's namespace, and keeps its state.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any

from lightning_hybrid.namespaces.lightning_namespaces import NAMESPACES, PUBLIC, Namespace

_TRAINER_ARGUMENTS = ("strategy", "plugins", "callbacks")


def convert(value: Any, namespace: Namespace) -> None:
    """Convert an object of this package to a namespace, in place; other objects are unchanged.

    Raises:
        TypeError: The object's class is derived from a class of the other namespace.
    """
    kind = type(value)
    if _is_of_other_namespace(kind, namespace):
        _convert_in_place(value, namespace)
        return
    for base in kind.__mro__:
        if _is_of_other_namespace(base, namespace):
            [other] = (other for other in NAMESPACES if other is not namespace)
            raise TypeError(
                f"{kind.__module__}.{kind.__qualname__} derives from {base.__name__} for {other.package}, but the"
                f" Trainer is of {namespace.package}; derive it from {namespace.explicit_home}.{base.__name__}, or use"
                f" the Trainer of {other.package}"
            )


def accept_both(module: ModuleType, namespace: Namespace) -> None:
    """Make the Trainer class of a module accept objects of this package that were made for the other namespace."""
    init: Callable[..., None] = module.Trainer.__init__
    if hasattr(init, "accepts_both_namespaces"):
        return

    @functools.wraps(init)
    def init_with_own(self: Any, *args: Any, **options: Any) -> None:
        for option in _TRAINER_ARGUMENTS:
            value = options.get(option)
            for one in value if isinstance(value, Collection) else (value,):
                convert(one, namespace)
        init(self, *args, **options)

    init_with_own.accepts_both_namespaces = True  # type: ignore[attr-defined]
    module.Trainer.__init__ = init_with_own


def _is_of_other_namespace(kind: type, namespace: Namespace) -> bool:
    return (
        kind.__name__ in PUBLIC
        and kind.__module__.startswith("lightning_hybrid.")
        and namespace.counterpart_of(kind.__module__) is not None
    )


def _convert_in_place(value: Any, namespace: Namespace) -> None:
    """Change the class of an object and of its attributes of the other namespace, such as Lightning's defaults."""
    name = namespace.counterpart_of(type(value).__module__)
    if name is None:
        return
    twin: Any = importlib.import_module(name)
    for part in type(value).__qualname__.split("."):
        twin = getattr(twin, part)
    object.__setattr__(value, "__class__", twin)  # also where it is frozen
    for attribute in vars(value).values():
        _convert_in_place(attribute, namespace)
