"""Side outputs of modules, such as a router's loss, which a step adds to its own loss.

A module deep inside a model calls ``give_aside``, and the code that runs the step collects the values with
``taking_asides``; the modules in between are not involved. If one of them is a unit of the step, the function mode of
the step returns the side outputs from inside as further results of the unit and emits them again outside. So in the
step graph they are values like any other: computed on one stage, sent to the stage that adds them up.

A second run of a forward, for recomputation in the backward, emits nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

# The list of the innermost unit or step that is running.
_collector: ContextVar[list[Any] | None] = ContextVar("collector", default=None)


class ResultWithSideOutputs(NamedTuple):
    """The result of a unit and the side outputs emitted inside it."""

    result: Any
    side_outputs: tuple[Any, ...]


def give_aside(value: Any) -> None:
    """Emit a tensor, or a tree of these, to the running step; no effect where no ``taking_asides`` is active."""
    collected = _collector.get()
    if collected is not None and torch._C._current_autograd_node() is None:
        collected.append(value)


@contextlib.contextmanager
def taking_asides(kind: type = object) -> Iterator[list[Any]]:
    """Collect the side outputs of a class emitted inside, in a list that is filled when the context ends.

    Those of other classes are emitted again in the outer context.
    """
    emitted: list[Any] = []
    collected: list[Any] = []
    token = _collector.set(emitted)
    try:
        yield collected
    finally:
        _collector.reset(token)
    for value in emitted:
        if isinstance(value, kind):
            collected.append(value)
        else:
            give_aside(value)


def with_side_outputs(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``forward`` so that it returns the side outputs emitted inside, too."""

    def run(*args: Any, **kwargs: Any) -> Any:
        collected: list[Any] = []
        token = _collector.set(collected)
        try:
            result = forward(*args, **kwargs)
        finally:
            _collector.reset(token)
        return ResultWithSideOutputs(result, tuple(collected)) if collected else result

    return run


def emit_side_outputs(result: Any) -> Any:
    """Emit the side outputs of a wrapped forward in the current context and return its plain result."""
    if not isinstance(result, ResultWithSideOutputs):
        return result
    for value in result.side_outputs:
        give_aside(value)
    return result.result
