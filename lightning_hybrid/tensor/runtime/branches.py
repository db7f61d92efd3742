"""Lines of code for which the plans of units are proved while a model runs, once for all units of a kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from lightning_hybrid.tensor.plan.unit_plan import UnitPlan


class Branches:
    """The proofs that were made in a run: which lines each of them covers."""

    def __init__(self, lines_of_branch: Callable[..., frozenset[int]]) -> None:
        """Begins without proofs.

        Args:
            lines_of_branch: Proves a plan of a unit with the arguments of one call; returns the lines that have called
                torch in that proof, none if it fails.
        """
        self._lines_of_branch = lines_of_branch
        self._proofs: list[tuple[int, UnitPlan, frozenset[int], frozenset[int]]] = []

    def lines(
        self,
        kind: int,
        unit: nn.Module,
        plan: UnitPlan,
        new: frozenset[int],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> frozenset[int]:
        """The lines of the proof for a call, which is made if no unit of the kind has run these lines before.

        Args:
            kind: The same for units of equal structure.
            unit: The unit.
            plan: Its plan.
            new: Lines of the call for which the plan is not proved.
            args: Arguments of the call.
            kwargs: Its keyword arguments.
        """
        plan = replace(plan, num_trials=0, seconds=0.0)
        for other_kind, other_plan, tried, lines in self._proofs:
            if (other_kind, tried) == (kind, new) and other_plan == plan:
                return lines
        lines = self._lines_of_branch(unit, args, kwargs, plan)
        self._proofs.append((kind, plan, new, lines))
        return lines
