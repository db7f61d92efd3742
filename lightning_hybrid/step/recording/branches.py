"""A check that a step does not branch on numbers read from the model: it is recorded again with other numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from math import isnan  # the function itself: a step asks another
from typing import Any

from torch import nn

from lightning_hybrid.errors import ControlFlowError, StepError
from lightning_hybrid.step.module_state.snapshots import AttributePath, reachable_leaves
from lightning_hybrid.step.recording.record import Recipe
from lightning_hybrid.step.standins.numbers import branch_message
from lightning_hybrid.step.tracing.recording import Recording

# Moderate, so that their exponentials are finite too.
_PROBES = (300.0, -300.0)


class BranchCheck:
    """Finds branches on numbers read from the model that became plain floats, which Python does not report.

    A step that branches on ``float(loss) > 2`` would compare a NaN where the loss is absent. So a step that reads
    numbers is recorded again with other numbers in their place, and must run the same operations.
    """

    def __init__(self, root: nn.Module, step: Callable[[], Any]) -> None:
        self._root = root
        self._step = step
        self._plain: dict[AttributePath, Any] = {}
        self._floats: dict[AttributePath, float] = {}

    def step(self) -> Any:
        """Run the user's step, and record the plain attributes after it."""
        result = self._step()
        leaves = dict(reachable_leaves(self._root))
        self._plain = {location: leaf for location, leaf in leaves.items() if type(leaf) in (bool, int, str)}
        self._floats = {location: leaf for location, leaf in leaves.items() if type(leaf) is float and not isnan(leaf)}
        return result

    def check(
        self,
        recording: Recording,
        recipe: Recipe,
    ) -> None:
        """Compare a recording of ``step`` with others by its recipe, with other numbers for those read.

        ``ControlFlowError`` is raised, in the step's context, where it runs other operations when the numbers differ.
        """
        if not recording.numbers_read:
            return
        plain, floats = self._plain, self._floats
        for probe in _PROBES:
            other = self._recorded(recipe, probe)
            if other is None:
                continue
            same = other.graph.operations == recording.graph.operations and self._plain == plain
            if not same or (self._float_changed(floats) and self._float_changes_again(recipe, probe)):
                with recipe.context():
                    raise ControlFlowError(branch_message(recording.numbers_read), entry="branch")

    def _recorded(self, recipe: Recipe, probe: float) -> Recording | None:
        try:
            return dataclasses.replace(recipe, absent_number=probe).record()
        except (StepError, ArithmeticError, ValueError):
            return None  # the probe is no valid number here: math.log(loss.item())

    def _float_changed(self, floats: dict[AttributePath, float]) -> bool:
        """Whether a float attribute changed that is none of the numbers read: `max(self.best, float(loss))`."""
        return any(location not in self._floats or self._floats[location] != leaf for location, leaf in floats.items())

    def _float_changes_again(self, recipe: Recipe, probe: float) -> bool:
        """Whether it changed because of the probe; a kept time changes in each run."""
        floats = self._floats
        return self._recorded(recipe, probe) is not None and not self._float_changed(floats)
