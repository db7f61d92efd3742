"""Reads of gradients by a training step of automatic optimization, which Lightning clears only after its forward.

Here the step runs its backwards too, and the memory of the gradients of the step before is freed for them. So code of
the user that would read those is refused, and finds no gradients where there were none, whatever microbatches of the
batch have run their backward.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.errors import StepError
from lightning_hybrid.patching import replaced
from lightning_hybrid.step.tracing.mode import user_line

_LIBRARIES = ("torch.", "lightning.", "pytorch_lightning.", "lightning_hybrid.")
_READERS = ("torch.nn.utils.", "lightning.pytorch.utilities.grads", "pytorch_lightning.utilities.grads")


class OldGradients:
    """The gradients of parameters from the step before."""

    def __init__(self, parameters: Collection[nn.Parameter]) -> None:
        """Record which parameters have one."""
        self._kept = {id(parameter) for parameter in parameters}
        self._freed = {id(parameter) for parameter in parameters if parameter.grad is not None}

    @contextlib.contextmanager
    def refused(self) -> Iterator[None]:
        """Run a step inside, whose code may not read them."""
        original: Any = Tensor.grad

        def get(parameter: Tensor) -> Tensor | None:
            if id(parameter) in self._kept and _is_read_by_user():
                if id(parameter) in self._freed:
                    raise _refusal()
                return None
            gradient: Tensor | None = original.__get__(parameter)
            return gradient

        def put(parameter: Tensor, gradient: Tensor | None) -> None:
            if _is_read_by_user():
                self._kept.discard(id(parameter))
            original.__set__(parameter, gradient)

        if not self._kept:
            yield
            return
        grad = property(get, put, lambda parameter: put(parameter, None))
        with replaced(nn.Parameter, "grad", grad, reason="gradients of the step before are freed"):
            yield


_completions = 0  # of gradients that are running now


@contextlib.contextmanager
def completing() -> Iterator[None]:
    """Let hooks inside read gradients, as they do in the backward that is completed."""
    global _completions
    _completions += 1
    try:
        yield
    finally:
        _completions -= 1


def _is_read_by_user() -> bool:
    """Whether code of the user, or a function of a library that reads gradients for it, reads outside of a backward."""
    name = sys._getframe(2).f_globals.get("__name__")
    return not _is_library(name) and torch._C._current_autograd_node() is None and not _completions


@functools.cache  # asked at each access of a gradient in a step
def _is_library(module: str | None) -> bool:
    """Whether a Python module is of a library that reads no gradients for its caller."""
    reader = f"{module}."
    return reader.startswith(_LIBRARIES) and not reader.startswith(_READERS)


def _refusal() -> StepError:
    return StepError(
        f"{user_line()}: training_step reads a gradient of the step before, which is freed before this step runs; read"
        " it in on_before_optimizer_step or on_before_zero_grad, and keep what you need of it",
        entry="old-gradient",
    )
