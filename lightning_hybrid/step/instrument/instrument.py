"""Instrumentation of user modules for a replay: forwards of units, metric methods, torch's checkpoint function.

The forwards of units and of drawing modules, the methods of metrics, and torch's checkpoint function ask a `Current`
which run of the step is under way. Putting them there for each microbatch would cost more than what they do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd import Function

from lightning_hybrid.randomness.keyed_draws import KeyedRandomness
from lightning_hybrid.step.instrument.activation_checkpointing import adopted_checkpoints
from lightning_hybrid.step.instrument.autograd_functions import functions_drawing_again, watched_functions
from lightning_hybrid.step.tracing.bound_apply import BoundFunction, users_functions
from lightning_hybrid.step.tracing.recording import Recording
from lightning_hybrid.step.tracing.step_mode import Current, watched_sinks, watched_units


class Replayed(Protocol):
    """What a replay is to be instrumented for: a ``StageReplay``."""

    @property
    def recording(self) -> Recording:
        """Of the step."""

    @property
    def drawing(self) -> Mapping[str, nn.Module]:
        """Modules that draw random numbers, by FQN."""

    @property
    def drawing_functions(self) -> Sequence[type[Function]]:
        """Autograd functions that may."""

    @property
    def sinks(self) -> Mapping[str, nn.Module]:
        """Metrics, by FQN."""


@contextlib.contextmanager
def installed(replays: Collection[Replayed], randomness: KeyedRandomness) -> Iterator[Current]:
    """Let the user's modules ask which run of the step is under way.

    Args:
        replays: All that will run inside; their recordings may know different units.
        randomness: Keys what the modules draw.

    Yields:
        To be handed to ``StageReplay.run``.
    """
    units: dict[str, nn.Module] = {}
    owned: dict[str, tuple[str, ...]] = {}
    drawing: dict[str, nn.Module] = {}
    sinks: Mapping[str, nn.Module] = {}
    bound: Sequence[BoundFunction] = ()
    functions: dict[type[Function], None] = {}
    for replay in dict.fromkeys(replays):
        units.update(replay.recording.units)
        owned.update(replay.recording.owned)
        drawing.update(replay.drawing)
        functions.update(dict.fromkeys(replay.drawing_functions))
        sinks, bound = replay.sinks, replay.recording.bound
    current = Current()
    again = functions_drawing_again(functions, randomness)
    with randomness.modules(drawing), again, asking(current, randomness, units, owned, sinks, bound):
        yield current


@contextlib.contextmanager
def asking(
    current: Current,
    randomness: KeyedRandomness,
    units: Mapping[str, nn.Module],
    owned: Mapping[str, tuple[str, ...]],
    sinks: Mapping[str, nn.Module],
    bound: Iterable[BoundFunction],
) -> Iterator[None]:
    """Let units, metrics, functions and checkpoints ask which run is under way.

    A recording and all that runs again what was recorded are inside, so that they take the same way through torch.

    Args:
        current: The run.
        randomness: Keys what is drawn.
        units: By FQN.
        owned: What each unit holds, by FQN.
        sinks: The metrics, by FQN.
        bound: Where the user's code keeps the ``apply`` of autograd functions.
    """
    with (
        watched_units(current, units, owned),
        watched_sinks(current, sinks),
        watched_functions(current, bound),
        adopted_checkpoints(current, randomness),
        slow_attention(),
        no_inference_mode(),
    ):
        yield


@contextlib.contextmanager
def drawing_as_stages(
    root: nn.Module,
    randomness: KeyedRandomness,
    step: int,
    microbatch: int,
    again: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function,
) -> Iterator[None]:
    """A whole module draws inside, in forward and backward, what its stages draw for a microbatch.

    Args:
        root: The user's module.
        randomness: Keys what it draws.
        step: Number of the batch in the run.
        microbatch: Number of the microbatch over all replicas.
        again: Makes a function that a backward runs once more from one that runs now.
    """
    with (
        randomness.microbatch(step, microbatch),
        randomness.modules({name: module for name, module in root.named_modules() if name}),
        randomness.watching(True),
        adopted_checkpoints(Current(), randomness, again),
        functions_drawing_again(users_functions(), randomness),
        randomness.each_draw(),
    ):
        yield


@contextlib.contextmanager
def no_inference_mode() -> Iterator[None]:
    """Let ``torch.inference_mode`` in a step be ``torch.no_grad``: its tensors do not tell when they are written."""
    enter = torch.inference_mode.__enter__

    def enter_no_grad(self: Any) -> None:
        if not self.mode:
            return enter(self)
        self._inference_mode_context = torch.no_grad()
        self._inference_mode_context.__enter__()

    torch.inference_mode.__enter__ = enter_no_grad  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.inference_mode.__enter__ = enter  # type: ignore[method-assign]


@contextlib.contextmanager
def slow_attention() -> Iterator[None]:
    """Keep ``nn.MultiheadAttention`` and ``nn.TransformerEncoder`` off their fused kernels of evaluation.

    These cannot be recorded: on stand-ins they make other results than in a run, asked for weights or under autocast,
    and an encoder looks at the content of its mask and joins its layers by nested tensors.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
