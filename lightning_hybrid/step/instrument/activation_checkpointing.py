"""Activation checkpointing that the user's own code asks for, under replay.

``torch.utils.checkpoint`` runs a function again during the backward, when no replay is under way. Inside a unit that
is right, as long as the second run draws the random numbers of the first. In the glue the function spans several
units, of which most may live elsewhere: there the call is replaced by recomputation of each unit inside it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch.utils.checkpoint

from lightning_hybrid.randomness.keyed_draws import KeyedRandomness
from lightning_hybrid.step.tracing.step_mode import Current, StepWatch

# On hooks for saved tensors that decide for each of them, where others have a stretch of code run again.
SAVES_EACH = "_hybrid_saves_each"

# The generators that ``checkpoint`` runs the function in; torch 2.14 has the first, and calls it alone.
_GENERATORS = ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")


@contextlib.contextmanager
def adopted_checkpoints(
    current: Current,
    randomness: KeyedRandomness,
    again: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function,
) -> Iterator[None]:
    """Let ``torch.utils.checkpoint.checkpoint``, however it was imported, respect units and keyed randomness.

    Args:
        current: The run that is under way.
        randomness: Keys what it draws.
        again: Makes a function that a backward runs once more from one that runs now.
    """
    home: Any = torch.utils.checkpoint
    name = next(name for name in _GENERATORS if hasattr(home, name))
    generator, function = getattr(home, name), home.CheckpointFunction

    def without_reentrant(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
        watch = current.watch
        if watch is None or watch.inside_unit:
            return generator(again(randomness.again(fn)), *args, **kwargs)
        return _each_unit(watch)

    def reentrant(fn: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        watch = current.watch
        if watch is None or watch.inside_unit:
            return function.apply(_first_plain(fn, again(randomness.again(fn))), preserve, *args)
        with watch.recomputing():
            return fn(*args)

    setattr(home, name, without_reentrant)
    # A class of our own would be a reference cycle.
    home.CheckpointFunction = SimpleNamespace(apply=reentrant)
    try:
        yield
    finally:
        setattr(home, name, generator)
        home.CheckpointFunction = function


def _each_unit(watch: StepWatch) -> Iterator[None]:
    """Stands in for torch's generator: it yields once, around the function's run."""
    with watch.recomputing():
        yield


def _first_plain(fn: Callable[..., Any], again: Callable[..., Any]) -> Callable[..., Any]:
    """The reentrant form calls one function twice: the forward's run, then the backward's."""
    runs = iter([fn])

    def run(*args: Any) -> Any:
        return next(runs, again)(*args)

    return run


def recomputed(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a unit and recompute it in the backward."""
    return torch.utils.checkpoint.checkpoint(lambda: run(*args, **kwargs), use_reentrant=False)
