"""Group plans: the placements and rules of one group of linears, and their merge into the plan of a unit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from lightning_hybrid.params.placement import Placement, Replicated, Shard
from lightning_hybrid.tensor.plan import NO_LINEAR, Group, LinearLike, Role, Rule, Site, UnitPlan
from lightning_hybrid.tensor.proof.example import Example


@dataclass
class GroupPlan:
    """One group of linears, and its entries in the fields of the `UnitPlan`."""

    group: Group  # the linears
    placements: dict[str, Placement]  # placements of the parameters and buffers that are sharded
    attributes: dict[str, dict[str, int]] = field(default_factory=dict)  # that are divided: FQN -> name -> value
    offsets: bool = False  # whether the code indexes the columns' outputs with offsets of the full output
    rules: dict[Site, Rule] = field(default_factory=dict)  # rewrites of calls
    summed: tuple[str, ...] = ()  # replicated parameters whose gradients are summed
    outputs: dict[int, int] = field(default_factory=dict)  # results that come out sharded: leaf index -> dim
    watched: bool = False  # whether it must run under `RegionMode`
    avoidable: bool = False  # whether only because of sizes and offsets, so that another variant may run without
    vocabulary: Mapping[str, int] = field(default_factory=dict)  # vocabulary-parallel parameters: FQN -> dim

    def roles(self) -> dict[str, Role]:
        """The role of each linear, by FQN."""
        if self.group.role == "vocabulary":  # its modules run unmodified
            return {}
        return {**dict.fromkeys(self.group.columns, self.group.role), **dict.fromkeys(self.group.rows, "row")}

    def fits(self, unit: nn.Module) -> bool:
        """Whether its placements have the lengths of the unit's parameters."""
        return all(
            not isinstance(placement, Shard) or unit.get_parameter(fqn).shape[placement.dim] == placement.length
            for fqn, placement in self.placements.items()
        )


def merged_plan(
    unit: nn.Module,
    size: int,
    groups: list[GroupPlan],
    linears: Mapping[str, LinearLike],
    example: Example,
    reasons: Mapping[str, str],
    rules: dict[Site, Rule] | None = None,
) -> UnitPlan:
    """Merges group plans into the plan of a unit."""
    placements: dict[str, Placement] = {fqn: Replicated() for fqn, _ in unit.named_parameters()}
    placements |= {fqn: Replicated() for fqn, _ in unit.named_buffers()}
    attributes: dict[str, dict[str, int]] = {}
    merged: dict[Site, Rule] = {}
    for group in groups:
        placements |= {fqn: placement for fqn, placement in group.placements.items() if fqn in placements}
        for fqn, values in group.attributes.items():
            attributes.setdefault(fqn, {}).update(values)
        merged |= group.rules
    roles = {fqn: role for group in groups for fqn, role in group.roles().items()}
    sharded = {fqn for fqn, placement in placements.items() if isinstance(placement, Shard)}
    repeated = [fqn for fqn, p in placements.items() if isinstance(p, Shard) and p.is_repeated(size)]
    grad_inputs = (k for k, leaf in enumerate(example.leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad)
    return UnitPlan(
        size=size,
        groups=tuple(group.group for group in groups),
        roles=roles,
        linears={fqn: linear for fqn, linear in linears.items() if fqn in roles},
        placements=placements,
        shared_pieces=tuple(sorted(repeated)),
        summed=tuple(sorted({fqn for group in groups for fqn in group.summed} - sharded)),
        attributes=attributes,
        rules=merged if rules is None else rules,
        offsets=frozenset(fqn for group in groups if group.offsets for fqn in group.group.columns),
        outputs={leaf_index: dim for group in groups for leaf_index, dim in group.outputs.items()},
        vocabulary={fqn: dim for group in groups for fqn, dim in group.vocabulary.items()},
        watched=any(group.watched for group in groups),
        grad_inputs=frozenset(grad_inputs),
        replicated_reasons={
            fqn: _reason(fqn, roles, reasons) for fqn, _ in unit.named_parameters() if fqn not in sharded
        },
    )


def _reason(fqn: str, roles: Mapping[str, Role], reasons: Mapping[str, str]) -> str:
    if fqn in reasons:
        return reasons[fqn]
    owner = fqn.rpartition(".")[0]
    is_bias = roles.get(owner) == "row" or roles.get(owner.rpartition(".")[0]) == "attention"
    return "added to the sum over ranks" if is_bias else NO_LINEAR
