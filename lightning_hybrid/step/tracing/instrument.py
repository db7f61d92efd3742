"""Instrumentation of a step: all patches of user modules and of torch that a recording or a replay needs.

The patched forwards and functions read the current run of the step from a `CurrentRun`: to patch them for each
microbatch would cost more than they do.

Activation checkpointing in the user's own code, under replay.

``torch.utils.checkpoint`` runs a function again during the backward, when no replay is active. Inside a unit that is
right, as long as the second run draws the random numbers of the first. In the glue the function spans several units,
most of which may be on other ranks: there the call is replaced by recomputation of each unit inside it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from lightning_hybrid.graph.step_graph import SINK
from lightning_hybrid.patching import ReplacedAll, replaced, replaced_forwards
from lightning_hybrid.randomness.keyed import KeyedRandomness
from lightning_hybrid.step.standins.counts import active_counter
from lightning_hybrid.step.standins.kernels import slow_attention
from lightning_hybrid.step.tracing.asides import emit_side_outputs, with_side_outputs
from lightning_hybrid.step.tracing.compiled import compiled_forward
from lightning_hybrid.step.tracing.functions import functions_with_repeated_draws, intercepted_functions, user_functions
from lightning_hybrid.step.tracing.mode import CurrentRun, StepMode

_METRIC_METHODS = ("forward", "update", "compute", "reset")


@contextlib.contextmanager
def intercepted_step(
    current: CurrentRun,
    randomness: KeyedRandomness,
    units: Mapping[str, nn.Module],
    owned: Mapping[str, tuple[str, ...]],
    sinks: Mapping[str, nn.Module],
) -> Iterator[None]:
    """Make units, metrics (``sinks``), autograd functions and checkpoints report to the current run.

    Recordings and replays both run inside, so that they call the same code paths of torch.
    """
    with (
        intercepted_units(current, units, owned),
        intercepted_metrics(current, sinks),
        intercepted_functions(current),
        patched_checkpointing(current, randomness),
        slow_attention(),
        replaced(torch.inference_mode, "__enter__", _enter_no_grad, reason="no inference tensors in steps"),
    ):
        yield


@contextlib.contextmanager
def draw_as_stages(
    root: nn.Module,
    randomness: KeyedRandomness,
    step: int,
    microbatch: int,
    again: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function,
) -> Iterator[None]:
    """Let an unpartitioned module draw, in forward and backward, the numbers that its stages draw for a microbatch.

    ``microbatch`` is its number over all replicas; ``again`` wraps a function that the backward runs again.
    """
    with (
        randomness.microbatch(step, microbatch),
        randomness.modules({name: module for name, module in root.named_modules() if name}),
        randomness.watching(True),
        patched_checkpointing(CurrentRun(), randomness, again),
        functions_with_repeated_draws(user_functions(), randomness),
        randomness.each_draw(),
    ):
        yield


_enter_inference = torch.inference_mode.__enter__


def _enter_no_grad(context: Any) -> None:
    """Enter ``torch.inference_mode`` as ``torch.no_grad``: inference tensors have no version counter for writes."""
    if not context.mode:
        return _enter_inference(context)
    context._inference_mode_context = torch.no_grad()
    context._inference_mode_context.__enter__()


def intercepted_units(
    current: CurrentRun, units: Mapping[str, nn.Module], owned: Mapping[str, tuple[str, ...]]
) -> ReplacedAll:
    """Make each call of these units one event of the current run, outside its forward and inside its hooks."""

    def wrap(fqn: str, original: Callable[..., Any]) -> Callable[..., Any]:
        name, members = "@" + fqn, owned[fqn]
        unit_forward = compiled_forward(units[fqn], original)
        run = with_side_outputs(unit_forward)

        def forward(*args: Any, **kwargs: Any) -> Any:
            watch = current.glue
            if watch is None or fqn not in watch.units:
                return unit_forward(*args, **kwargs)
            return emit_side_outputs(watch.call(name, members, run, args, kwargs))

        return forward

    return replaced_forwards(units, wrap, reason="units are nodes of a step")


def intercepted_metrics(current: CurrentRun, sinks: Mapping[str, nn.Module]) -> ReplacedAll:
    """Make each call of these metrics one event of the current run."""

    def intercepted(fqn: str, method: str, original: Callable[..., Any]) -> Callable[..., Any]:
        state = SINK + fqn  # the pseudo-parameter that represents the metric's state

        def call(*args: Any, **kwargs: Any) -> Any:
            watch = current.glue
            if watch is None:
                return original(*args, **kwargs)
            return watch.call(f"{state}.{method}", (state,), watch.sink_method(fqn, method, original), args, kwargs)

        return call

    methods = ((fqn, sink, method) for fqn, sink in sinks.items() for method in _METRIC_METHODS)
    patches = ((sink, method, intercepted(fqn, method, getattr(sink, method))) for fqn, sink, method in methods)
    return ReplacedAll(patches, reason="metrics are nodes of a step")


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
            return _counted(generator(again(randomness.again(fn)), *args, **kwargs))
        return _checkpoint_each_unit(watch)

    def reentrant(fn: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        watch = current.glue
        if watch is None and active_counter() is not None:
            return _recorded(fn, args)
        if watch is None:
            return function.apply(_plain_then_rerun(fn, again(randomness.again(fn))), preserve, *args)
        with watch.checkpointing():
            return fn(*args)

    # A class defined here would be a reference cycle.
    in_class = "CheckpointFunction", SimpleNamespace(apply=reentrant)
    patches = [(checkpoint_module, *patch) for patch in ((name, without_reentrant), in_class)]
    with ReplacedAll(patches, reason="checkpoints recompute units with keyed random numbers"):
        yield


def _checkpoint_each_unit(watch: StepMode) -> Iterator[None]:
    """Replaces torch's generator: it yields once, around the run of the function."""
    with watch.checkpointing():
        yield


def _counted(generator: Iterator[None]) -> Iterator[None]:
    """The generator of a checkpoint, whose function counts as run again where it is recorded."""
    counter = active_counter()
    with contextlib.nullcontext() if counter is None else counter.repeating():
        yield from generator


def _recorded(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Run the function of a reentrant checkpoint so that its backward is counted, which autograd does not see."""
    if any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
        return torch.utils.checkpoint.checkpoint(fn, *args, use_reentrant=False)
    with torch.no_grad():  # it gives no gradients
        return fn(*args)


def _plain_then_rerun(fn: Callable[..., Any], again: Callable[..., Any]) -> Callable[..., Any]:
    """The function for reentrant checkpoints, which call it twice: in the forward, then in the backward."""
    runs = iter([fn])

    def run(*args: Any) -> Any:
        return next(runs, again)(*args)

    return run


def checkpointed(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a unit and recompute it in the backward."""
    return torch.utils.checkpoint.checkpoint(lambda: run(*args, **kwargs), use_reentrant=False)
