"""Push-back for streams that can be read once: items taken for inspection are the first that the run gets.

A loader, or an iterable dataset, may hand out the next items of one iterator each time it is iterated over. Another
iterator of it begins where the last one stopped, so one that was made to take an example from has to be continued.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from torch import Tensor, nn

from lightning_hybrid.patching import reduced_as
from lightning_hybrid.randomness.generator_snapshot import GeneratorStates
from lightning_hybrid.step.objects.pytree import children_of

_DEEPEST = 3


def is_one_shot(value: Any, depth: int = 0) -> bool:
    """Whether an iterable holds an iterator, or is one; ``depth`` is that of the containers around it."""
    if isinstance(value, Iterator):
        return True
    if depth > _DEEPEST or isinstance(value, Tensor | nn.Module | type | str | bytes):
        return False
    parts = children_of(value)
    inner = parts[0][:10] if parts is not None else list(getattr(value, "__dict__", {}).values())
    return any(is_one_shot(part, depth + 1) for part in inner)


class PushedBackItems:
    """Items taken, and the rest of the stream; generators advanced by the taking advance when it is read."""

    def __init__(self, taken: list[Any], rest: Iterator[Any], before: GeneratorStates, after: GeneratorStates) -> None:
        self._items = chain(taken, rest)
        self._before, self._after = before, after

    def __iter__(self) -> Iterator[Any]:
        """Read it, once."""
        if self._before.are_unchanged():
            self._after.restore()
        yield from self._items


def push_back(owner: Any, back: PushedBackItems) -> Any:
    """Let the next reader that iterates over ``owner`` get ``back``, and later ones what they would have got.

    Returns the owner, or its replacement where it is a bare iterator.
    """
    kind = type(owner)

    def iterate(self: Any) -> Iterator[Any]:
        if type(self) is not given:  # it has been read since this iterator was made
            yield from kind.__iter__(self)
            return
        self.__class__ = kind
        yield from back

    try:
        members = {"__iter__": iterate, "__module__": kind.__module__, "__reduce_ex__": reduced_as(kind)}
        given = type(kind.__name__, (kind,), members)
        owner.__class__ = given
    except TypeError:  # a generator, or another object of Python's own
        return iter(back)
    return owner
