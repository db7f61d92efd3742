"""Wrappers around a method of one module instance, removable in any order."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any, TypeAlias

from torch import nn

Around: TypeAlias = Callable[[Any, Callable[[], Any]], Any]


def wrap_method(module: nn.Module, name: str, around: Around) -> Callable[[], None]:
    """Wraps a method of an instance: calls of it return ``around(module, run)``.

    The method keeps its signature, and on a deep copy of the module it is a method of the copy. Several wrappers may be
    on the same method, and be removed in any order.

    Args:
        module: Instance whose method is wrapped.
        name: Name of the method.
        around: Calls ``run``, which has the arguments; the last wrapper is the outermost.

    Returns:
        A function that removes ``around``; further calls do nothing.
    """
    wrapper = _wrapper_of(module, name)
    arounds: list[Around] = wrapper.arounds
    arounds.append(around)

    def leave() -> None:
        if around in arounds:
            arounds.remove(around)
        is_installed = module.__dict__.get(name) is wrapper
        if is_installed and not arounds:
            del module.__dict__[name]
            if wrapper.original is not None:
                module.__dict__[name] = wrapper.original

    return leave


def _wrapper_of(module: nn.Module, name: str) -> Any:
    """Returns the wrapper method on the instance; installs it if there is none."""
    wrapper = module.__dict__.get(name)
    if wrapper is None or not hasattr(wrapper, "arounds"):
        wrapper = module.__dict__[name] = MethodType(_wrapping(module, name), module)
    return wrapper


def _wrapping(module: nn.Module, name: str) -> Any:
    original: Any = module.__dict__.get(name)
    is_method = isinstance(original, MethodType) and original.__self__ is module
    method: Any = original.__func__ if is_method else getattr(type(module), name) if original is None else None
    arounds: list[Around] = []

    @functools.wraps(original if method is None else method)
    def wrapping(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        inputs = (*args,) if method is None else (self, *args)
        run: Callable[[], Any] = functools.partial(original if method is None else method, *inputs, **kwargs)
        for around in tuple(arounds):
            run = functools.partial(around, self, run)
        return run()

    marked: Any = wrapping
    if method is None:  # a function that user code has set on the instance
        signature = inspect.signature(original)
        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        del marked.__wrapped__
        marked.__signature__ = signature.replace(parameters=[first, *signature.parameters.values()])
    marked.arounds, marked.original = arounds, original
    return marked
