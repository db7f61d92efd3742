"""Keyed random numbers for steps that run as plain Python: equal to those of pipeline stages."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator

from torch import nn

from lightning_hybrid.params.guards import ReadGuards
from lightning_hybrid.randomness.keyed_draws import KeyedRandomness
from lightning_hybrid.step.instrument.instrument_step import draw_as_stages
from lightning_hybrid.step.instrument.intercept_or_refuse_autograd_functions import (
    functions_with_repeated_draws,
    user_functions,
)
from lightning_hybrid.step.instrument.replay_user_activation_checkpointing import patched_checkpointing
from lightning_hybrid.step.tracing.intercept_step_operations import CurrentRun


class PlainStepRandomness:
    """Keys the random numbers that the user's modules and functions draw."""

    def __init__(self, root: nn.Module, randomness: KeyedRandomness, guards: ReadGuards) -> None:
        """Set up for one module; ``guards`` tracks whether user code or a backward runs."""
        self._root, self._randomness, self._guards = root, randomness, guards
        self._drawing: dict[str, dict[str, nn.Module]] = {}  # modules that draw in a step, by the name of the step

    @contextlib.contextmanager
    def keyed(self, name: str, number: int, microbatch: int) -> Iterator[None]:
        """Draw the random numbers of pipeline stages inside.

        The first run of a step is observed everywhere, and shows which modules draw. Later runs are observed in these
        only; other code draws from the generators as the microbatch has seeded them.

        Args:
            name: Name of the step.
            number: Number of the batch in the run.
            microbatch: Number of the microbatch, over all replicas.
        """
        root, randomness = self._root, self._randomness
        if name not in self._drawing:
            again = self._guards.as_user_code
            with draw_as_stages(root, randomness, number, microbatch, again), randomness.recording_modules() as codes:
                yield
            named = {fqn: module for fqn, module in root.named_modules() if zlib.crc32(fqn.encode()) in codes}
            self._drawing[name] = {"": root, **named} if 0 in codes else named
            return
        drawing = self._drawing[name]
        functions = user_functions() if drawing else []
        with contextlib.ExitStack() as stack:
            stack.enter_context(randomness.microbatch(number, microbatch))
            stack.enter_context(randomness.modules({fqn: module for fqn, module in drawing.items() if fqn}))
            stack.enter_context(patched_checkpointing(CurrentRun(), randomness, self._guards.as_user_code))
            stack.enter_context(functions_with_repeated_draws(functions, randomness))
            if "" in drawing:
                stack.enter_context(randomness.watching(True))
                stack.enter_context(randomness.each_draw())
            yield
