"""Trials of one group of linears, cut in one way: the rules and sums that its run asks for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from lightning_hybrid.parts.placement import Placement, Shard
from lightning_hybrid.tensor.plan.unit_plan import LinearLike, Rule, Site, UnitPlan
from lightning_hybrid.tensor.search.context_search import at_rest
from lightning_hybrid.tensor.search.group_plan import Part, plan_of
from lightning_hybrid.tensor.trial.equivalence_proof import Proof


@dataclass(frozen=True)
class AtRest:
    """How parameters lie on tensor ranks, where a search is over tensor ranks times context ranks.

    Attributes:
        placements: Over tensor ranks, by FQN.
        size: Number of tensor ranks.
        context: Number of context ranks.
    """

    placements: Mapping[str, Placement]
    size: int
    context: int

    def is_of(self, placements: Mapping[str, Placement]) -> bool:
        """Whether cuts over tensor ranks times context ranks are those over tensor ranks, cut further."""
        if self.size == 1:
            return True
        left = at_rest(placements, self.size, self.context)
        return not isinstance(left, str) and all(self.placements[fqn] == found for fqn, found in left.items())


class PartTrials:
    """Trials of parts of a plan of one unit on some ranks.

    Attributes:
        kept: Parameters that stay whole, or are cut otherwise, each with the reason; no part may have them.
    """

    def __init__(
        self,
        proof: Proof,
        linears: Mapping[str, LinearLike],
        reasons: Mapping[str, str],
        kept: dict[str, str],
        at_rest: AtRest | None,
        *,
        careful: bool,
    ) -> None:
        """Say what is tried.

        Args:
            proof: On the ranks.
            linears: All that ran.
            reasons: Why parameters are whole; what is found later is looked up too.
            kept: See above.
            at_rest: For an exchange of positions: how parameters lie on fewer ranks.
            careful: Whether gradients are looked at, and not outputs alone.
        """
        self.kept = kept
        self._careful = careful
        self._proof, self._linears, self._reasons, self._at_rest = proof, linears, reasons, at_rest

    def plan(self, parts: list[Part], rules: dict[Site, Rule] | None = None) -> UnitPlan:
        """As `plan_of`."""
        proof = self._proof
        return plan_of(proof.unit, proof.ranks.size, parts, self._linears, proof.example, self._reasons, rules)

    def tried(self, part: Part) -> tuple[Part | None, str]:
        """The part with what a trial of it alone showed, or None and why it is wrong."""
        proof = self._proof
        proof.relative_error = math.inf
        if not part.fits(proof.unit):
            return None, "its sizes cannot be divided"
        if self._at_rest is not None and not self._at_rest.is_of(part.placements):
            return None, "its parameters would have to be cut otherwise at rest"
        if kept := self.kept.keys() & part.placements.keys():
            return None, f"pairs with {min(kept)}, {self.kept[min(kept)]}"
        rules: dict[Site, Rule] = {}
        failure = self._failure(part, rules)
        if failure is not None and proof.cut_outputs:
            part.outputs = proof.cut_outputs
            rules = {}
            failure = self._failure(part, rules)
        watch = proof.ranks.watches[0]
        if failure is None and self._at_rest is None and not proof.is_as_first(proof.evaluating):
            # Code that runs in eval mode alone has rules too; what exchanges positions is learnt in it once more.
            failure = proof.difference(self.plan([part], rules=rules), proof.evaluating, learning=True)
        if failure is not None or watch is None:
            return None, failure or "nothing ran sharded"
        elsewhere = watch.inside | watch.outside | self.kept.keys()
        sliced = {fqn: dim for fqn, dim in watch.sliced.items() if fqn not in elsewhere}
        for fqn, dim in sliced.items():
            shape = self._named(fqn).shape
            part.placements[fqn] = Shard.evenly(dim % len(shape), shape[dim], proof.ranks.size)
        mixed = watch.inside & watch.outside | (set(watch.sliced) - set(sliced))
        part.summed = tuple(sorted(watch.inside - mixed - set(part.placements)))
        # A parameter that is cut from now on need not be sliced at its use.
        part.rules = {site: rule for site, rule in rules.items() if site[1] != "side" or site[3] not in sliced}
        must = bool(mixed or part.outputs) or watch.entered or watch.drew
        made = [(site, rule) for site, rule in part.rules.items() if rule]
        part.watched = must or bool(made)
        part.avoidable = bool(made) and not must and all(_is_size(site, rule) for site, rule in made)
        return part, ""

    def _failure(self, part: Part, rules: dict[Site, Rule]) -> str | None:
        # Gradients of weights say nothing that outputs and gradients of inputs and biases do not; the proof has them.
        weights = frozenset(linear.parameter("weight") for linear in self._linears.values())
        return self._proof.difference(
            self.plan([part], rules=rules),
            self._proof.first,
            learning=True,
            forward_only=not self._careful,
            without=weights - part.vocabulary.keys(),
        )

    def _named(self, fqn: str) -> Tensor:
        owner, _, name = fqn.rpartition(".")
        value = getattr(self._proof.unit.get_submodule(owner), name)
        assert isinstance(value, Tensor)
        return value


def _is_size(site: Site, rule: Rule) -> bool:
    """Whether a rule rewrites a size or an offset; the others are about values or groups."""
    return site[1] == "view" or rule in (("expand",), ("offsets",))
