"""Activation checkpointing in the user's own code, under replay.

``torch.utils.checkpoint`` runs a function again during the backward, when no replay is active. Inside a unit that is
right, as long as the second run draws the random numbers of the first. In the glue the function spans several units,
most of which may be on other ranks: there the call is replaced by recomputation of each unit inside it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch.utils.checkpoint

from lightning_hybrid.patching import ReplacedAll
from lightning_hybrid.randomness.keyed import KeyedRandomness
from lightning_hybrid.step.tracing.mode import CurrentRun, StepMode

# The generators in which ``checkpoint`` runs the function; torch 2.14 has the first, and calls only that one.
_GENERATORS = ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")


@contextlib.contextmanager
def patched_checkpointing(
    current: CurrentRun,
    randomness: KeyedRandomness,
    again: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function,
) -> Iterator[None]:
    """Patch ``torch.utils.checkpoint.checkpoint``, however it was imported, for units and keyed randomness.

    ``again`` wraps a function that the backward runs again.
    """
    checkpoint_module: Any = torch.utils.checkpoint
    name = next(name for name in _GENERATORS if hasattr(checkpoint_module, name))
    generator, function = getattr(checkpoint_module, name), checkpoint_module.CheckpointFunction

    def without_reentrant(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
        watch = current.glue
        if watch is None:
            return generator(again(randomness.again(fn)), *args, **kwargs)
        return _recompute_each_unit(watch)

    def reentrant(fn: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        watch = current.glue
        if watch is None:
            return function.apply(_plain_then_rerun(fn, again(randomness.again(fn))), preserve, *args)
        with watch.recomputing():
            return fn(*args)

    # A class defined here would be a reference cycle.
    in_class = "CheckpointFunction", SimpleNamespace(apply=reentrant)
    patches = [(checkpoint_module, *patch) for patch in ((name, without_reentrant), in_class)]
    with ReplacedAll(patches, reason="checkpoints recompute units with keyed random numbers"):
        yield


def _recompute_each_unit(watch: StepMode) -> Iterator[None]:
    """Replaces torch's generator: it yields once, around the run of the function."""
    with watch.recomputing():
        yield


def _plain_then_rerun(fn: Callable[..., Any], again: Callable[..., Any]) -> Callable[..., Any]:
    """The function for reentrant checkpoints, which call it twice: in the forward, then in the backward."""
    runs = iter([fn])

    def run(*args: Any) -> Any:
        return next(runs, again)(*args)

    return run


def recomputed(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a unit and recompute it in the backward."""
    return torch.utils.checkpoint.checkpoint(lambda: run(*args, **kwargs), use_reentrant=False)
