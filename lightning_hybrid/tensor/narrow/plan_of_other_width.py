"""The plan of a unit, for a copy of the unit of another width: pieces, linears and attributes have other sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from torch import nn

from lightning_hybrid.parts.parameter_shard_placement import Placement, Shard
from lightning_hybrid.tensor.plan.unit_plan import LinearLike, PositionsPlan, UnitPlan

_P = TypeVar("_P", bound=Placement)


def plan_of_other_width(plan: UnitPlan, unit: nn.Module, other: nn.Module) -> UnitPlan:
    """Returns a plan of `unit` for `other`, a copy whose sizes are multiples or parts of those of the unit.

    Raises:
        ValueError: A size cannot be converted.
    """
    before, after = (dict((*each.named_parameters(), *each.named_buffers())) for each in (unit, other))

    def converted(placements: Mapping[str, _P]) -> dict[str, _P]:
        return {
            fqn: _with_length(placement, before[fqn].shape[placement.dim], after[fqn].shape[placement.dim])
            if isinstance(placement, Shard)
            else placement
            for fqn, placement in placements.items()
        }

    attributes = {
        fqn: {
            name: _scaled(value, vars(unit.get_submodule(fqn))[name], vars(other.get_submodule(fqn))[name])
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
        found[fqn] = _with_length(placement, getattr(plan.linears[fqn], side), getattr(linears[fqn], side))
    return found


def _linear(linear: LinearLike, other: nn.Module) -> LinearLike:
    shape = other.get_parameter(linear.parameter("weight")).shape
    return replace(linear, num_out=shape[linear.out_dim], num_in=shape[linear.in_dim])


def _with_length(placement: _P, length: int, other: int) -> _P:
    assert isinstance(placement, Shard)
    pieces = tuple(replace(piece, length=_scaled(piece.length, length, other)) for piece in placement.pieces)
    return replace(placement, pieces=pieces)


def _scaled(value: int, size: int, other: int) -> int:
    if value * other % size:
        raise ValueError(f"{value} of {size} has no equal share in {other}")
    return value * other // size
