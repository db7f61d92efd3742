"""The techniques of the planner, in the order in which a layout names them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_hybrid.predict.techniques.experts import Experts
from lightning_hybrid.predict.techniques.logits import ChunkedLoss
from lightning_hybrid.predict.techniques.offload import Offload
from lightning_hybrid.predict.techniques.recompute import Recompute
from lightning_hybrid.predict.techniques.schedule import Schedule
from lightning_hybrid.predict.techniques.sequence import SequenceParallel
from lightning_hybrid.predict.techniques.technique import PlanLayout, PlanTechnique
from lightning_hybrid.predict.techniques.zero import Zero

PLANNED: tuple[PlanTechnique, ...] = (
    Experts(),
    Schedule(),
    Zero(),
    SequenceParallel(),
    Recompute(),
    Offload(),
    ChunkedLoss(),
)
SETTINGS: Mapping[str, Any] = {name: value for each in PLANNED for name, value in each.settings.items()}
LIMITS: Mapping[str, Any] = {name: value for each in PLANNED for name, value in each.limits.items()}
SIZES = tuple(each.size for each in PLANNED if each.size)


def sharded_kinds(layout: PlanLayout) -> set[str]:
    """Return which of "parameters", "gradients" and "states" are shards over replicas."""
    return {kind for each in PLANNED for kind in each.sharded(layout)}


def elsewhere(layout: PlanLayout) -> set[str]:
    """Return the terms of memory that are not on the device."""
    return {term for each in PLANNED for term in each.elsewhere(layout)}
