"""Hooks on the gradients of parameters that a step registers itself: once, as in one process.

A step runs once per microbatch and stage of a rank, and each run may register the hooks of the step again. The last
one stays: it is the one whose handle the user's code has kept, unless it keeps all of them.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_hybrid.parts.gradient_hooks import REGISTRATIONS
from lightning_hybrid.patching import around
from lightning_hybrid.step.objects.modules import modules_in, parameters_of


class StepHooks:
    """The hooks that one step registers on parameters; from its creation to ``close``."""

    def __init__(self, root: nn.Module) -> None:
        self._parameters = {id(parameter) for _, parameter in parameters_of(modules_in(root))}
        self._kept: dict[tuple[int, str, int], RemovableHandle] = {}  # by parameter, kind, and number in a run
        self._counts: Counter[tuple[int, str]] | None = None  # of the present run
        self._undo = [
            around(torch.Tensor, name, self._registration(name), reason="a step registers each hook once")
            for name in REGISTRATIONS
        ]

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        """Run the step inside, on a part of its batch or for one stage."""
        before, self._counts = self._counts, Counter()
        try:
            yield
        finally:
            self._counts = before

    def _registration(self, name: str) -> Callable[..., Any]:
        def register(original: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
            counts = self._counts
            if counts is None or id(tensor) not in self._parameters:
                return original(tensor, *args, **kwargs)
            self._counts = None  # a function mode may call this again
            try:
                handle = original(tensor, *args, **kwargs)
            finally:
                self._counts = counts
            key = id(tensor), name, counts[id(tensor), name]
            counts[id(tensor), name] += 1
            if key in self._kept:
                self._kept[key].remove()
            self._kept[key] = handle
            return handle

        return register

    def remove(self) -> None:
        """Remove the hooks of the step, which is undone."""
        for handle in self._kept.values():
            handle.remove()
        self._kept.clear()

    def close(self) -> None:
        """Let steps register hooks without this object."""
        while self._undo:
            self._undo.pop()()


@contextlib.contextmanager
def without_registrations(root: nn.Module) -> Iterator[None]:
    """Run steps inside that are undone: hooks that they register on parameters are removed at the end."""
    hooks = StepHooks(root)
    try:
        with hooks.run():
            yield
    finally:
        hooks.close()
        hooks.remove()
