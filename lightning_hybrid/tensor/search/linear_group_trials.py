"""Trials of one variant of a group of linears: whether it is right, and the rules and gradient sums that it needs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter

from lightning_hybrid.parts.parameter_shard_placement import Placement, Shard
from lightning_hybrid.tensor.plan.unit_plan import LinearLike, Rule, Site, UnitPlan
from lightning_hybrid.tensor.search.merge_group_plans_into_unit import GroupPlan, merged_plan
from lightning_hybrid.tensor.search.search_context_parallel_exchanges import stored_placements
from lightning_hybrid.tensor.trial.sharded_unit_proof import Proof


@dataclass(frozen=True)
class StoredPlacements:
    """Placements of the stored parameters on tensor ranks, for a search over tensor ranks times context ranks.

    Attributes:
        placements: Placements over tensor ranks, by FQN.
        size: Number of tensor ranks.
        context: Number of context ranks.
    """

    placements: Mapping[str, Placement]
    size: int
    context: int

    def agrees_with(self, placements: Mapping[str, Placement]) -> bool:
        """Whether placements over tensor ranks times context ranks only shard the stored shards further."""
        if self.size == 1:
            return True
        reduced = stored_placements(placements, self.size, self.context)
        return not isinstance(reduced, str) and all(self.placements[fqn] == found for fqn, found in reduced.items())


class GroupTrials:
    """Runs trials of single groups of one unit.

    Attributes:
        excluded: Parameters that no group may have, each with the reason: replicated, or sharded in another way.
    """

    def __init__(
        self,
        proof: Proof,
        linears: Mapping[str, LinearLike],
        reasons: Mapping[str, str],
        excluded: dict[str, str],
        stored: StoredPlacements | None,
        *,
        check_gradients: bool,
    ) -> None:
        """Binds the trials to a unit and to the ranks of its proof.

        Args:
            proof: Of the unit, on these ranks.
            linears: All linears that ran.
            reasons: Why parameters are replicated; a live mapping, entries that are added later count.
            excluded: As the attribute.
            stored: For an exchange of positions: the placements over tensor ranks.
            check_gradients: Whether gradients are compared too, and not outputs alone.
        """
        self.excluded = excluded
        self._check_gradients = check_gradients
        self._proof, self._linears, self._reasons, self._stored = proof, linears, reasons, stored

    def plan(self, groups: list[GroupPlan], rules: dict[Site, Rule] | None = None) -> UnitPlan:
        """Merges groups into a plan of the unit, as `merged_plan`."""
        proof = self._proof
        return merged_plan(proof.unit, proof.ranks.size, groups, self._linears, proof.example, self._reasons, rules)

    def try_group(self, group: GroupPlan) -> tuple[GroupPlan | None, str]:
        """Tries one group by itself; returns it with the rules and sums that it needs, or None and what is wrong."""
        proof = self._proof
        proof.relative_error = math.inf
        if not group.fits(proof.unit):
            return None, "its sizes cannot be divided"
        if self._stored is not None and not self._stored.agrees_with(group.placements):
            return None, "it would need another sharding of the stored parameters"
        if excluded := self.excluded.keys() & group.placements.keys():
            return None, f"pairs with {min(excluded)}, {self.excluded[min(excluded)]}"
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
            return None, failure or "nothing ran sharded"
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
        return group, ""

    def _failure(self, group: GroupPlan, rules: dict[Site, Rule]) -> str | None:
        # Gradients of weights show no more than outputs and gradients of inputs and biases; the proof compares them.
        weights = frozenset(linear.parameter("weight") for linear in self._linears.values())
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
