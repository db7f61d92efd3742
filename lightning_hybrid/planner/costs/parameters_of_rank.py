"""Numbers of parameters that tensor and expert ranks leave to one rank: `parameters_of_rank`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from lightning_hybrid.planner.costs.layer_costs import LayerCosts
from lightning_hybrid.planner.plan_layout import PlanLayout


class Parameters(NamedTuple):
    """Numbers of parameters that one rank computes with.

    Attributes:
        dense: Those outside experts.
        experts: Those of experts.
    """

    dense: float
    experts: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.dense + self.experts

    def over_shards(self, layout: PlanLayout) -> Parameters:
        """Return what ZeRO leaves to one rank of these."""
        return Parameters(self.dense / layout.shard, self.experts / layout.expert_shards)


def parameters_of_rank(layers: Iterable[tuple[LayerCosts, int]], layout: PlanLayout) -> Parameters:
    """Return the parameters of layers, each with the number of equal ones, that one rank computes with.

    Tensor ranks divide the width of experts, too.
    """
    dense = experts = 0.0
    for layer, count in layers:
        replicated = layer.parameters - layer.sharded_parameters - layer.expert_parameters
        dense += count * (replicated + layer.sharded_parameters / layout.tensor)
        experts += count * layer.expert_parameters / (layout.expert * layout.tensor)
    return Parameters(dense, experts)
