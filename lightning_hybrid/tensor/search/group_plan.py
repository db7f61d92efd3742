"""The plan of a unit as the sum of what each group of linears adds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from lightning_hybrid.parts.placement import Placement, Replicated, Shard
from lightning_hybrid.tensor.plan.unit_plan import Group, LinearLike, Role, Rule, Site, UnitPlan
from lightning_hybrid.tensor.search.plan_variants import Variant
from lightning_hybrid.tensor.trial.example_inputs import Example


@dataclass
class Part:
    """A group with what it adds to a plan.

    Attributes:
        group: The linears.
        placements: Of parameters and buffers that are cut.
        attributes: Whole numbers that are divided.
        offsets: Whether offsets into columns' outputs are written in terms of the whole.
        rules: What is rewritten.
        summed: Replicated parameters whose gradients are summed.
        outputs: Results of the unit that come out cut: place -> dim.
        watched: Whether it needs a watch.
        avoidable: Whether only for sizes and offsets that another variant might get right by itself.
        vocabulary: Parameters that are cut by their vocabulary: FQN -> dim.
    """

    group: Group
    placements: dict[str, Placement]
    attributes: dict[str, dict[str, int]] = field(default_factory=dict)
    offsets: bool = False
    rules: dict[Site, Rule] = field(default_factory=dict)
    summed: tuple[str, ...] = ()
    outputs: dict[int, int] = field(default_factory=dict)
    watched: bool = False
    avoidable: bool = False
    vocabulary: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of_pair(cls, columns: tuple[str, ...], rows: tuple[str, ...], variant: Variant, origin: str) -> Part:
        """A pair, cut in one of its ways."""
        group = Group("column", columns, rows, variant.how, origin)
        return cls(group, dict(variant.placements), variant.attributes, variant.offsets)

    def roles(self) -> dict[str, Role]:
        """The role of each linear."""
        if self.group.role == "vocabulary":  # its modules run as they are
            return {}
        return {**dict.fromkeys(self.group.columns, self.group.role), **dict.fromkeys(self.group.rows, "row")}

    def fits(self, unit: nn.Module) -> bool:
        """Whether its placements are those of parameters of this size."""
        return all(
            not isinstance(placement, Shard) or unit.get_parameter(fqn).shape[placement.dim] == placement.length
            for fqn, placement in self.placements.items()
        )


def plan_of(
    unit: nn.Module,
    size: int,
    parts: list[Part],
    linears: Mapping[str, LinearLike],
    example: Example,
    reasons: Mapping[str, str],
    rules: dict[Site, Rule] | None = None,
) -> UnitPlan:
    """The plan that parts make together.

    Args:
        unit: The unit, or a copy.
        size: Number of tensor ranks.
        parts: What is cut.
        linears: All that ran.
        example: Arguments of one call.
        reasons: Why parameters are whole, where that is known.
        rules: Filled while the plan is tried; those of the parts if None.
    """
    placements: dict[str, Placement] = {fqn: Replicated() for fqn, _ in unit.named_parameters()}
    placements |= {fqn: Replicated() for fqn, _ in unit.named_buffers()}
    attributes: dict[str, dict[str, int]] = {}
    merged: dict[Site, Rule] = {}
    for part in parts:
        placements |= {fqn: placement for fqn, placement in part.placements.items() if fqn in placements}
        for fqn, values in part.attributes.items():
            attributes.setdefault(fqn, {}).update(values)
        merged |= part.rules
    roles = {fqn: role for part in parts for fqn, role in part.roles().items()}
    cut = {fqn for fqn, placement in placements.items() if isinstance(placement, Shard)}
    repeated = [fqn for fqn, p in placements.items() if isinstance(p, Shard) and p.is_repeated(size)]
    quiet = (k for k, leaf in enumerate(example.leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad)
    return UnitPlan(
        size=size,
        groups=tuple(part.group for part in parts),
        roles=roles,
        linears={fqn: linear for fqn, linear in linears.items() if fqn in roles},
        placements=placements,
        shared_pieces=tuple(sorted(repeated)),
        summed=tuple(sorted({fqn for part in parts for fqn in part.summed} - cut)),
        attributes=attributes,
        rules=merged if rules is None else rules,
        offsets=frozenset(fqn for part in parts if part.offsets for fqn in part.group.columns),
        outputs={place: dim for part in parts for place, dim in part.outputs.items()},
        vocabulary={fqn: dim for part in parts for fqn, dim in part.vocabulary.items()},
        watched=any(part.watched for part in parts),
        quiet=frozenset(quiet),
        kept={fqn: _reason(fqn, roles, reasons) for fqn, _ in unit.named_parameters() if fqn not in cut},
    )


def _reason(fqn: str, roles: Mapping[str, Role], reasons: Mapping[str, str]) -> str:
    """Why a parameter is whole on every rank."""
    if fqn in reasons:
        return reasons[fqn]
    owner = fqn.rpartition(".")[0]
    is_bias = roles.get(owner) == "row" or roles.get(owner.rpartition(".")[0]) == "attention"
    return "added to the sum over ranks" if is_bias else "no weight of a linear"
