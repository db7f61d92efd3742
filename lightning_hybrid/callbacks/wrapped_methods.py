"""Run something around a method of one module, for as long as a callback is at work."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any, TypeAlias

from torch import nn

Around: TypeAlias = Callable[[Any, Callable[[], Any]], Any]


def wrap_method(module: nn.Module, name: str, around: Around) -> Callable[[], None]:
    """Call ``around(module, run)`` where the method was called; what it returns is the result.

    The method keeps its signature, and on a deep copy of the module it is a method of the copy. Several may wrap the
    same method, and leave in any order.

    Args:
        module: Whose method, on the instance alone.
        name: Of the method.
        around: Calls ``run``, which has the arguments; the last one to come is the outermost.

    Returns:
        Takes ``around`` away; more than once does no harm.
    """
    ours = _wrapped(module, name)
    arounds: list[Around] = ours.arounds
    arounds.append(around)

    def leave() -> None:
        if around in arounds:
            arounds.remove(around)
        is_there = module.__dict__.get(name) is ours
        if is_there and not arounds:
            del module.__dict__[name]
            if ours.own is not None:
                module.__dict__[name] = ours.own

    return leave


def _wrapped(module: nn.Module, name: str) -> Any:
    """Our method on the instance, which is put there if there is none."""
    ours = module.__dict__.get(name)
    if ours is None or not hasattr(ours, "arounds"):
        ours = module.__dict__[name] = MethodType(_wrapping(module, name), module)
    return ours


def _wrapping(module: nn.Module, name: str) -> Any:
    own: Any = module.__dict__.get(name)
    is_method = isinstance(own, MethodType) and own.__self__ is module
    method: Any = own.__func__ if is_method else getattr(type(module), name) if own is None else None
    arounds: list[Around] = []

    @functools.wraps(own if method is None else method)
    def wrapping(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = (*args,) if method is None else (self, *args)
        run: Callable[[], Any] = functools.partial(own if method is None else method, *given, **kwargs)
        for around in tuple(arounds):
            run = functools.partial(around, self, run)
        return run()

    marked: Any = wrapping
    if method is None:  # a function that somebody has put on the instance
        takes = inspect.signature(own)
        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        del marked.__wrapped__
        marked.__signature__ = takes.replace(parameters=[first, *takes.parameters.values()])
    marked.arounds, marked.own = arounds, own
    return marked
