"""The plan of a unit, for a copy of the unit of another width: pieces, linears and attributes have other sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from lightning_hybrid.parts.parameter_shard_placement import Placement, Shard, scaled
from lightning_hybrid.tensor.plan.unit_plan import LinearLike, PositionsPlan, UnitPlan


def plan_of_other_width(plan: UnitPlan, unit: nn.Module, other: nn.Module) -> UnitPlan:
    """Returns a plan of `unit` for `other`, a copy whose sizes are multiples or parts of those of the unit.

    Raises:
        ValueError: A size cannot be converted.
    """
    after = dict((*other.named_parameters(), *other.named_buffers()))

    def converted(placements: Mapping[str, Placement]) -> dict[str, Any]:
        return {
            fqn: placement.scaled_to(after[fqn].shape[placement.dim]) if isinstance(placement, Shard) else placement
            for fqn, placement in placements.items()
        }

    attributes = {
        fqn: {
            name: scaled(value, vars(unit.get_submodule(fqn))[name], vars(other.get_submodule(fqn))[name])
            for name, value in values.items()
        }
        for fqn, values in plan.attributes.items()
    }
    linears = {fqn: _linear(linear, other) for fqn, linear in plan.linears.items()}
    positions, full_sequence_plan = plan.positions, plan.full_sequence_plan
    if positions is not None:
        positions = replace(
            positions,
            features=_features(positions, plan, linears),
            parameter_shards=converted(positions.parameter_shards),
        )
    if full_sequence_plan is not None:
        full_sequence_plan = plan_of_other_width(full_sequence_plan, unit, other)
    return replace(
        plan,
        placements=converted(plan.placements),
        attributes=attributes,
        linears=linears,
        positions=positions,
        full_sequence_plan=full_sequence_plan,
    )


def _features(positions: PositionsPlan, plan: UnitPlan, linears: Mapping[str, LinearLike]) -> dict[str, Shard]:
    found = {}
    for fqn, placement in positions.features.items():
        side = "num_in" if plan.roles.get(fqn) == "row" else "num_out"
        found[fqn] = placement.scaled_to(getattr(linears[fqn], side))
    return found


def _linear(linear: LinearLike, other: nn.Module) -> LinearLike:
    shape = other.get_parameter(linear.parameter("weight")).shape
    return replace(linear, num_out=shape[linear.out_dim], num_in=shape[linear.in_dim])
