"""Give a Trainer's namespace the objects that were made for the other one.

A file can ask for `Hybrid3DStrategy` before anything says whose Trainer will get it. So a Trainer takes ours of either
namespace: the object it is given becomes one of its own, with the state that it has.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Collection
from typing import Any

from lightning_hybrid.namespaces.lightning_names import NAMESPACES, PUBLIC, Namespace

_GIVEN_TO_TRAINERS = ("strategy", "plugins", "callbacks")


def move(given: Any, namespace: Namespace) -> None:
    """Turn an object of ours into one of a namespace, in place; everything else stays.

    Raises:
        TypeError: An object of a class that somebody derived from the other namespace's.
    """
    kind = type(given)
    if _is_ours_elsewhere(kind, namespace):
        _become_twin(given, namespace)
        return
    for base in kind.__mro__:
        if _is_ours_elsewhere(base, namespace):
            [other] = (other for other in NAMESPACES if other is not namespace)
            raise TypeError(
                f"{kind.__module__}.{kind.__qualname__} derives from {base.__name__} for {other.package}, but the"
                f" Trainer is of {namespace.package}; derive it from {namespace.explicit_home}.{base.__name__}, or use"
                f" the Trainer of {other.package}"
            )


def move_all(given: Any, namespace: Namespace) -> None:
    """`move` one object, or each of several."""
    for one in given if isinstance(given, Collection) else (given,):
        move(one, namespace)


def accept_both(trainer_class: Any, namespace: Namespace) -> None:
    """Let a Trainer take objects of ours that were made for the other namespace."""
    init: Callable[..., None] = trainer_class.__init__
    if hasattr(init, "accepts_both_namespaces"):
        return

    @functools.wraps(init)
    def init_with_own(self: Any, *args: Any, **options: Any) -> None:
        for option in _GIVEN_TO_TRAINERS:
            move_all(options.get(option), namespace)
        init(self, *args, **options)

    init_with_own.accepts_both_namespaces = True  # type: ignore[attr-defined]
    trainer_class.__init__ = init_with_own


def _is_ours_elsewhere(kind: type, namespace: Namespace) -> bool:
    return (
        kind.__name__ in PUBLIC
        and kind.__module__.startswith("lightning_hybrid.")
        and namespace.name_here(kind.__module__) is not None
    )


def _become_twin(thing: Any, namespace: Namespace) -> None:
    """Change the class of an object and of what it holds from the other namespace, such as a default of Lightning's."""
    name = namespace.name_here(type(thing).__module__)
    if name is None:
        return
    twin: Any = importlib.import_module(name)
    for part in type(thing).__qualname__.split("."):
        twin = getattr(twin, part)
    object.__setattr__(thing, "__class__", twin)  # also where it is frozen
    for value in vars(thing).values():
        _become_twin(value, namespace)
