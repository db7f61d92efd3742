"""The techniques of the planner, in the order in which a layout names them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning_hybrid.predict.techniques.technique import PlanTechnique
from lightning_hybrid.predict.techniques.zero import Zero

if TYPE_CHECKING:
    from lightning_hybrid.predict.layout import PlanLayout

PLANNED: tuple[PlanTechnique, ...] = (Zero(),)
SETTINGS: Mapping[str, Any] = {name: value for each in PLANNED for name, value in each.settings.items()}
LIMITS: Mapping[str, Any] = {name: value for each in PLANNED for name, value in each.limits.items()}


def sharded_kinds(layout: PlanLayout) -> set[str]:
    """Return which of "parameters", "gradients" and "states" are shards over replicas."""
    return {kind for each in PLANNED for kind in each.sharded(layout)}
