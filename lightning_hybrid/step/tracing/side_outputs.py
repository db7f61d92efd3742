"""Side outputs of modules: a router's loss, say, which a step adds to its own.

A module deep inside a model calls ``give_aside``, and whoever runs the step takes what was given with
``taking_asides``; the modules in between know nothing of it. Where a module in between is one unit of the step, the
watch of the step takes what was given inside it as further results of the unit and gives it on outside. So to the step
graph such a value is like any other: known on the stage that makes it, sent to the one that adds it up.

A second run of a forward, which a backward makes to compute activations again, gives nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

# Of the innermost unit or step that is running.
_taken: ContextVar[list[Any] | None] = ContextVar("taken", default=None)


class ResultWithAsides(NamedTuple):
    """What a unit returned, and what was given beside it."""

    result: Any
    asides: tuple[Any, ...]


def give_aside(value: Any) -> None:
    """Give a value to the step that is running; without effect where nobody takes it.

    Args:
        value: A tensor, or a tree of tensors and plain values.
    """
    taken = _taken.get()
    if taken is not None and torch._C._current_autograd_node() is None:
        taken.append(value)


@contextlib.contextmanager
def taking_asides(kind: type = object) -> Iterator[list[Any]]:
    """Take what is given inside; what is of another kind is given on, to who is around.

    Args:
        kind: The class of the values to take.

    Yields:
        The values, in the order in which they were given; there afterwards.
    """
    given: list[Any] = []
    taken: list[Any] = []
    token = _taken.set(given)
    try:
        yield taken
    finally:
        _taken.reset(token)
    for value in given:
        if isinstance(value, kind):
            taken.append(value)
        else:
            give_aside(value)


def returning_asides(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward``, with what is given inside as part of what it returns."""

    def run(*args: Any, **kwargs: Any) -> Any:
        taken: list[Any] = []
        token = _taken.set(taken)
        try:
            result = forward(*args, **kwargs)
        finally:
            _taken.reset(token)
        return ResultWithAsides(result, tuple(taken)) if taken else result

    return run


def given_on(result: Any) -> Any:
    """What a forward returned; what was given beside it is given once more, to who is around."""
    if not isinstance(result, ResultWithAsides):
        return result
    for value in result.asides:
        give_aside(value)
    return result.result
