"""Experts: ranks that share the experts of each layer, among replicas and context ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from lightning_hybrid.predict.links import all_to_all_seconds
from lightning_hybrid.predict.techniques.technique import (
    Candidates,
    Family,
    LayerCosts,
    PlanLayout,
    PlanTechnique,
    StepModel,
)

ROUTING_PROOF = (
    "which experts ranks can share is proved at the start of a run; the plan with expert ranks is subject to that proof"
)


class Experts(PlanTechnique):
    """``expert`` ranks, each with a part of the experts of each layer."""

    settings: ClassVar = {"expert": 1}
    limits: ClassVar = {"expert": True}
    options: ClassVar = {"expert_parallel_size": "expert"}
    short: ClassVar = {"expert_parallel_size": "ep"}
    size: ClassVar = "expert"
    routing_proof: ClassVar = ROUTING_PROOF

    def sizes(self, room: int, candidates: Candidates) -> Iterable[Mapping[str, Any]]:
        """Return the numbers of ranks that divide the experts and the room."""
        if "expert" in candidates.fixed:
            return [{"expert": candidates.fixed["expert"]}]
        routes = candidates.costs.routes if candidates.allowed.expert else 0
        return [{"expert": size} for size in range(1, routes + 1) if routes % size == room % size == 0] or [{}]

    def routed_ranks(self, layout: PlanLayout) -> int:
        """Return the expert ranks."""
        return int(layout.expert)

    def layer_terms(self, step: StepModel, layer: LayerCosts, size: float, passes: int) -> dict[str, float]:
        """Return the seconds of all-to-alls to experts and back."""
        if step.layout.expert == 1 or not layer.routed_tokens:
            return {}
        routed = size * layer.routed_tokens / max(step.costs.positions, 1)
        group = step.group(step.layout.expert, step.layout.tensor)
        return {"expert ranks": 2 * passes * all_to_all_seconds(routed, group, step.hardware, step.waited)}

    def arguments(self, layout: PlanLayout) -> dict[str, Any]:
        """Return the number of ranks."""
        return {"expert_parallel_size": layout.expert} if layout.expert > 1 else {}

    def families(self, devices_per_node: int) -> Iterable[Family]:
        """Return the layouts with expert ranks."""
        return [Family("expert ranks", lambda layout: layout.expert > 1, _why_none, place=4)]


def _why_none(candidates: Candidates) -> str:
    if "expert" in candidates.fixed:
        return f"expert_parallel_size={candidates.fixed['expert']} is set"
    if not candidates.allowed.expert:
        return "not permitted for this model"
    costs = candidates.costs
    if costs.routes:
        return f"{costs.routes} experts and the replicas have no common divisor"
    unknown = "the step was not recorded, so that its experts are not known; fix their ranks"
    return "the model has no experts" if costs.is_traced else unknown
