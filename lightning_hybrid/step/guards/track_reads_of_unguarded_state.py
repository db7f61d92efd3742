"""Unguarded reads: state that a step reads and that no guard compares, so that the next batch may take another trace.

They are: the number of the batch, the trainer (its steps and epochs), random numbers, the content of the batch, and
attributes that the step changes itself. A step without any of these takes the same trace as long as the plain
attributes around its units (``plain_state``) are unchanged.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy
from torch import Tensor, nn

from lightning_hybrid.patching import replaced
from lightning_hybrid.step.guards.plain_attribute_state import plain_state
from lightning_hybrid.step.objects.pytree import flatten


class UnguardedReads:
    """Collects the unguarded reads of one recording of a step.

    Attributes:
        first: Description of the first one, for messages; empty if there is none.
        of_batch: Whether one is of the content of the batch.
    """

    def __init__(self) -> None:
        self.first, self.of_batch = "", False

    def add(self, description: str, *, of_batch: bool = False) -> None:
        """Record an unguarded read."""
        self.first, self.of_batch = self.first or description, self.of_batch or of_batch

    def track_arguments(self, batch: Any, rest: Sequence[Any]) -> list[Any]:
        """Record non-tensors in the batch as read; return the other arguments, the number of the batch tracked."""
        for leaf in flatten(batch)[0]:
            if not isinstance(leaf, Tensor | bool | None):
                self.add(f"a {type(leaf).__name__} in the batch", of_batch=True)
        # C code that takes it as an index (a list, `operator.index`) reads it unseen: such a step may leave its trace.
        number = [TrackedInt(each, self) if type(each) is int else each for each in rest[:1]]
        return [*number, *rest[1:]]

    @contextlib.contextmanager
    def watching(self, root: nn.Module, modules: Sequence[nn.Module]) -> Iterator[None]:
        """Record the reads of a step of ``root`` that runs inside; ``modules`` are those whose code is glue."""
        generators, state = _generator_states(), plain_state(modules)
        with self._trainer_watched(root):
            yield
        if _generator_states() != generators:
            self.add("random numbers of Python or numpy")
        if plain_state(modules) != state:
            self.add("attributes that it changes")

    @contextlib.contextmanager
    def _trainer_watched(self, root: nn.Module) -> Iterator[None]:
        """Wrap the property of the root's class: `self.trainer`, also as read by others such as `self.global_step`."""
        owner: Any = next((c for c in type(root).__mro__ if isinstance(vars(c).get("trainer"), property)), None)
        if owner is None:
            yield
            return
        original: property = vars(owner)["trainer"]

        def trainer(module: Any) -> Any:
            self.add("the trainer")
            assert original.fget is not None
            return original.fget(module)

        watched = property(trainer, original.fset, original.fdel)
        with replaced(owner, "trainer", watched, reason="guards: a step reads the trainer"):
            yield


def _generator_states() -> Any:
    _, keys, position, *_ = numpy.random.get_state()
    return random.getstate(), numpy.asarray(keys).tobytes(), position


class TrackedInt(int):
    """An integer that records when anything is computed from it or branches on it."""

    _unguarded_reads: UnguardedReads

    def __new__(cls, number: int, unguarded_reads: UnguardedReads) -> TrackedInt:
        """Make it of ``number``; ``unguarded_reads`` records the reads."""
        self = super().__new__(cls, number)
        self._unguarded_reads = unguarded_reads
        return self

    def _record(self) -> None:
        self._unguarded_reads.add("a number that it is given, such as batch_idx")

    def __reduce__(self) -> Any:
        """Pickle or copy as an ordinary number, whose reads cannot be recorded."""
        self._record()
        return int, (int.__index__(self),)


def _tracked(name: str) -> Callable[..., Any]:
    original = getattr(int, name)

    def method(self: TrackedInt, *others: Any) -> Any:
        self._record()
        return original(self, *others)

    return method


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow", "and", "or", "xor", "lshift", "rshift")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_UNARY = ("hash", "bool", "index", "int", "float", "str", "neg", "pos", "abs", "invert")
_ROUNDING = ("round", "trunc", "floor", "ceil")
for _name in (*_BINARY, *(f"r{name}" for name in _BINARY), *_COMPARISONS, *_UNARY, *_ROUNDING):
    setattr(TrackedInt, f"__{_name}__", _tracked(f"__{_name}__"))
