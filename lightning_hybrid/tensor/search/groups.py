"""Group plans: the placements and rules of one group of linears, their trials, and their merge into a unit's plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter

import torch
from torch import nn

from lightning_hybrid.params.placement import Placement, Replicated, Shard
from lightning_hybrid.tensor.plan import NO_LINEAR, Group, LinearLike, Role, Rule, Site, UnitPlan, split_placements
from lightning_hybrid.tensor.proof.proof import Proof
from lightning_hybrid.tensor.search.requests import UnitTask


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


class GroupTrials:
    """Runs trials of single groups of one unit.

    Attributes:
        linears: The linears that ran, by FQN.
        reasons: Why parameters stay replicated.
        excluded: Parameters that no group may have, each with the reason: replicated, or sharded in another way.
    """

    def __init__(
        self,
        task: UnitTask,
        proof: Proof,
        linears: Mapping[str, LinearLike],
        stored: Mapping[str, Placement] | None,
        check_gradients: bool,
    ) -> None:
        """Binds the trials to a proof; ``stored`` are the placements on tensor ranks, for exchanges of positions."""
        self._task, self._proof, self._stored, self._check_gradients = task, proof, stored, check_gradients
        self.linears, self.reasons, self.excluded = linears, dict(task.excluded), dict(task.excluded)

    def plan(self, groups: list[GroupPlan], rules: dict[Site, Rule] | None = None) -> UnitPlan:
        """Merges groups into a plan of the unit, with the rules of the groups or a dict that trials fill."""
        unit, size = self._proof.unit, self._proof.ranks.size
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
        grad_inputs = (
            k
            for k, leaf in enumerate(self._proof.example.leaves)
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        )
        return UnitPlan(
            size=size,
            groups=tuple(group.group for group in groups),
            roles=roles,
            linears={fqn: linear for fqn, linear in self.linears.items() if fqn in roles},
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
                fqn: _reason(fqn, roles, self.reasons) for fqn, _ in unit.named_parameters() if fqn not in sharded
            },
        )

    def _agrees_with_stored(self, placements: Mapping[str, Placement]) -> bool:
        """Whether placements over tensor ranks times context ranks only shard the stored shards further."""
        if self._stored is None or self._task.size == 1:
            return True
        try:
            reduced, _ = split_placements(placements, self._task.size, self._task.context)
        except ValueError:
            return False
        return all(self._stored[fqn] == found for fqn, found in reduced.items())

    def try_group(self, group: GroupPlan) -> GroupPlan | str:
        """Tries one group by itself; returns it with the rules and sums that it needs, or what is wrong."""
        proof = self._proof
        proof.relative_error = math.inf
        if not group.fits(proof.unit):
            return "its sizes cannot be divided"
        if not self._agrees_with_stored(group.placements):
            return "it would need another sharding of the stored parameters"
        if excluded := self.excluded.keys() & group.placements.keys():
            return f"pairs with {min(excluded)}, {self.excluded[min(excluded)]}"
        rules: dict[Site, Rule] = {}
        failure = self._failure(group, rules)
        if failure is not None and proof.sharded_outputs:
            group.outputs = proof.sharded_outputs
            rules = {}
            failure = self._failure(group, rules)
        watch = None if proof.ranks.first_unit is None else proof.ranks.first_unit.last_region_mode
        if failure is None and self._stored is None and not proof.runs_as_first(proof.eval_mode):
            # Code that runs only in eval mode needs rules too; for exchanges they are learned in that setting again.
            failure = proof.difference(self.plan([group], rules=rules), proof.eval_mode, learning=True)
        if failure is not None or watch is None:
            return failure or "nothing ran sharded"
        elsewhere = watch.inside | watch.outside | self.excluded.keys()
        sliced = {fqn: dim for fqn, dim in watch.sliced.items() if fqn not in elsewhere}
        for fqn, dim in sliced.items():
            shape = attrgetter(fqn)(proof.unit).shape
            group.placements[fqn] = Shard.evenly(dim % len(shape), shape[dim], proof.ranks.size)
        mixed = watch.inside & watch.outside | (set(watch.sliced) - set(sliced))
        group.summed = tuple(sorted(watch.inside - mixed - set(group.placements)))
        # A parameter that is sharded from now on need not be sliced at its use.
        group.rules = {site: rule for site, rule in rules.items() if site[1] != "side" or site[3] not in sliced}
        is_required = bool(mixed or group.outputs) or watch.entered or watch.drew
        rewrites = [(site, rule) for site, rule in group.rules.items() if rule]
        group.watched = is_required or bool(rewrites)
        group.avoidable = bool(rewrites) and not is_required and all(_is_size(site, rule) for site, rule in rewrites)
        return group

    def _failure(self, group: GroupPlan, rules: dict[Site, Rule]) -> str | None:
        # Gradients of weights show no more than outputs and gradients of inputs and biases; the proof compares them.
        weights = frozenset(linear.parameter("weight") for linear in self.linears.values())
        return self._proof.difference(
            self.plan([group], rules=rules),
            self._proof.first,
            learning=True,
            forward_only=not self._check_gradients,
            without=weights - group.vocabulary.keys(),
        )


def _is_size(site: Site, rule: Rule) -> bool:
    """Whether a rule rewrites a size or an offset; other rules are for values or groups."""
    return site[1] == "view" or rule in (("expand",), ("offsets",))


def _reason(fqn: str, roles: Mapping[str, Role], reasons: Mapping[str, str]) -> str:
    if fqn in reasons:
        return reasons[fqn]
    owner = fqn.rpartition(".")[0]
    is_bias = roles.get(owner) == "row" or roles.get(owner.rpartition(".")[0]) == "attention"
    return "added to the sum over ranks" if is_bias else NO_LINEAR
