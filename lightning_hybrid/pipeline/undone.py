"""Runs of a step whose effects are undone."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from lightning_hybrid.equivalence.deterministic import WithoutDropoutMode
from lightning_hybrid.params.gradient_hooks import without_registrations
from lightning_hybrid.pipeline.runtime.rollback import StepSnapshot
from lightning_hybrid.randomness.generators import GeneratorStates
from lightning_hybrid.randomness.keyed import KeyedRandomness


class UndoneRuns:
    """Runs of a step whose effects are undone; see ``undone_runs``."""

    def __init__(
        self, root: nn.Module, device: torch.device, parameters: Sequence[nn.Parameter], *, trains: bool
    ) -> None:
        switched = (m for m in root.modules() if isinstance(m, _NormBase) or not trains)
        self._switched = [module for module in switched if module.training]
        self._start, self._generators = StepSnapshot(root, copied=math.inf), GeneratorStates(device)
        self._gradients = [(parameter, parameter.grad) for parameter in parameters]
        self._begin()

    def are_unchanged(self) -> bool:
        """Whether no run has drawn random numbers."""
        return self._generators.are_unchanged()

    def undo(self) -> bool:
        """Undo a run; returns whether none has drawn random numbers."""
        self._start.restore()
        self._begin()
        return self.are_unchanged()

    def _begin(self) -> None:
        for module in self._switched:
            module.training = False
        for parameter, _ in self._gradients:
            parameter.grad = None

    def end(self) -> None:
        """Undo the last run, and give modules and parameters back what they had."""
        self._start.restore()
        for module in self._switched:
            module.training = True
        for parameter, gradient in self._gradients:
            parameter.grad = gradient


@contextlib.contextmanager
def undone_runs(
    root: nn.Module,
    randomness: KeyedRandomness,
    parameters: Sequence[nn.Parameter] = (),
    *,
    trains: bool = True,
) -> Iterator[UndoneRuns]:
    """Run steps inside without prints; their effects, also on gradients of ``parameters``, are undone.

    Dropout is off, and layers that normalize over samples use their running statistics; unless the step ``trains``, all
    modules are in eval mode.
    """
    quiet = contextlib.redirect_stdout(io.StringIO())
    dropout = WithoutDropoutMode() if trains else contextlib.nullcontext()
    with randomness.isolated(), dropout, quiet, without_registrations(root):
        runs = UndoneRuns(root, randomness.device, parameters, trains=trains)
        try:
            yield runs
        finally:
            runs.end()
