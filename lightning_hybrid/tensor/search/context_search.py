"""The search for context parallelism: how positions are sharded, alone or beside tensor ranks.

Three things are found by trying, each on ranks of its own:

    on T tensor ranks       how linears are cut; so they lie at rest, and so calls run whose positions are not dealt
    on T * C tensor ranks   how the features of a region lie where context ranks exchange positions for features
    on T x C ranks          which regions must exchange, the others see a rank's own positions; and how what a context
                            rank has is dealt once more to its tensor ranks, if that is asked for

A region that exchanges runs as on T * C tensor ranks, heads and all, and only its linears know that weights are cut
over T of them. So nothing about heads, sizes and side values is found anew, and what was found is proved as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from lightning_hybrid.parts.placement import Placement, Shard, over_two
from lightning_hybrid.tensor.plan.unit_plan import Deal, DealtBy, LinearLike, PositionsPlan, UnitPlan
from lightning_hybrid.tensor.search.group_plan import Part, plan_of
from lightning_hybrid.tensor.search.sequence_search import deal_positions, sequence_of
from lightning_hybrid.tensor.trial.equivalence_proof import Proof

HELD_WHOLE = "context ranks hold all parameters"


@dataclass(frozen=True)
class Regions:
    """What is cut in a unit.

    Attributes:
        linears: All that ran.
        parts: As they are cut over tensor ranks.
        exchanged: The same, and others where there is one tensor rank, as cut over tensor ranks times context ranks.
        reasons: Why parameters are whole, where that is known.
        unexchanged: Why some cannot be cut so.
    """

    linears: Mapping[str, LinearLike]
    parts: list[Part]
    exchanged: list[Part]
    reasons: Mapping[str, str]
    unexchanged: str = ""


# A part as it is cut at rest, how the features of its linears lie on all ranks, and what else is cut over all of them.
_Exchanged = tuple[Part, dict[str, Shard], dict[str, Shard]]


def deal_in_context(unit: nn.Module, plan: UnitPlan, regions: Regions, proof: Proof, deal: Deal) -> UnitPlan:
    """The plan with positions dealt to context ranks, and exchanged only where they are mixed; or why they are not.

    Args:
        unit: A copy of the unit with random weights.
        plan: Over tensor ranks, proved; where there is one, a plan that cuts nothing.
        regions: What it cuts.
        proof: Of the unit, on tensor ranks times context ranks.
        deal: Whether what a context rank has is dealt once more to its tensor ranks.
    """
    narrowed = [_narrowed(part, regions.linears, plan.size, proof.ranks.context) for part in regions.exchanged]
    reasons = [regions.unexchanged, *(found for found in narrowed if isinstance(found, str))]
    exchanged = [found for found in narrowed if not isinstance(found, str)]
    sequence = sequence_of(proof)
    failures: dict[DealtBy, str] = {}
    for by in _WAYS[deal]:
        found = _least_exchanged(partial(_dealt, unit, plan, regions, proof, sequence, by), exchanged, proof)
        if isinstance(found, UnitPlan):
            note = f"positions of a context rank on each of its tensor ranks ({failures.get('both')})"
            return replace(found, notes=(*found.notes, *([note] if failures else [])))
        failures[by] = found
    reason = "; ".join(dict.fromkeys(word for word in (*reasons, failures["context"]) if word))
    return replace(plan, context=proof.ranks.context, undealt=reason)


_WAYS: Mapping[Deal, tuple[DealtBy, ...]] = {"tensor": ("both", "context"), None: ("context",)}


def _least_exchanged(dealt: Callable[..., UnitPlan | str], exchanged: list[_Exchanged], proof: Proof) -> UnitPlan | str:
    """A proved plan that exchanges in as few regions as may be, or what is wrong.

    Args:
        dealt: `_dealt` of regions that exchange.
        exchanged: The regions that may exchange.
        proof: Of the unit.
    """
    tried = [(exchanged, dealt(exchanged))]
    for part in exchanged if isinstance(tried[0][1], UnitPlan) else ():
        if part[0].group.role == "attention":
            continue
        fewer = [other for other in exchanged if other is not part]
        without = dealt(fewer, like=tried[-1][1])
        if isinstance(without, UnitPlan):
            exchanged = fewer
            tried.append((fewer, without))
    failure = ""
    for regions, found in reversed(tried):
        wrong = found if isinstance(found, str) else proof.first_failure(found)
        if isinstance(found, UnitPlan) and wrong is not None:
            found = dealt(regions, guess=False)
            wrong = found if isinstance(found, str) else proof.first_failure(found)
        if isinstance(found, UnitPlan) and wrong is None:
            return found
        failure = failure or str(wrong)
    return failure


def _dealt(
    unit: nn.Module,
    plan: UnitPlan,
    regions: Regions,
    proof: Proof,
    sequence: tuple[int, int] | None,
    by: DealtBy,
    exchanged: list[_Exchanged],
    guess: bool = True,
    like: UnitPlan | None = None,
) -> UnitPlan | str:
    """The plan with these regions exchanged, right in one mode; or what is wrong with it."""
    size, context = proof.ranks.size, proof.ranks.context
    keys = {_key(part) for part, _, _ in exchanged}
    parts = [part for part in regions.parts if _key(part) not in keys]
    parts += [part for part, _, _ in exchanged]
    features = {fqn: placement for _, found, _ in exchanged for fqn, placement in found.items()}
    held = {fqn: placement for _, _, found in exchanged for fqn, placement in found.items()}
    order = list(regions.linears)
    parts.sort(key=lambda part: order.index(part.group.columns[0]) if part.group.columns[0] in order else -1)
    made = plan_of(unit, size, parts, regions.linears, proof.example, regions.reasons)
    if made.placements != plan.placements:
        return "regions that exchange positions would have to be cut otherwise at rest"
    candidate = replace(
        made,
        context=context,
        kept=plan.kept,
        uneven=plan.uneven,
        notes=plan.notes,
        positions=PositionsPlan(by=by, place=0, dim=1, num_dims=3, features=features, parts=held),
    )
    dealt = deal_positions(unit, candidate, proof, by, sequence=sequence, guess=guess, prove=False, like=like)
    if dealt.undealt:
        return dealt.undealt
    return dealt if size == 1 else replace(dealt, otherwise=plan)


def at_rest(placements: Mapping[str, Placement], size: int, context: int) -> dict[str, Placement] | str:
    """What is left of placements over tensor ranks times context ranks on tensor ranks; or what cannot be cut so.

    Args:
        placements: By FQN.
        size: Number of tensor ranks.
        context: Number of context ranks.
    """
    found: dict[str, Placement] = {}
    for fqn, placement in placements.items():
        cuts = over_two(placement, size, context) if isinstance(placement, Shard) else (placement, placement)
        if cuts is None:
            return f"{fqn} is not cut over {size} tensor ranks and {context} context ranks"
        found[fqn] = cuts[0]
    return found


def _narrowed(part: Part, linears: Mapping[str, LinearLike], size: int, context: int) -> _Exchanged | str:
    """A part that exchanges, from how it is cut over all ranks; or why it cannot."""
    placements = at_rest(part.placements, size, context)
    if isinstance(placements, str):
        return placements
    features: dict[str, Shard] = {}
    of_linears: set[str] = set()
    for fqn, role in part.roles().items():
        if role == "attention":
            continue
        linear = linears[fqn]
        placement = part.placements[linear.parameter("weight")]
        assert isinstance(placement, Shard)
        if linear.feature_dim != -1:
            return f"the features of {fqn} are not in the last dim"
        if role == "row" and placement.is_repeated(size * context):
            return f"ranks share features of {fqn}"
        features[fqn] = Shard(-1, placement.pieces)
        of_linears |= {linear.parameter("weight"), linear.parameter("bias")}
    further = {
        fqn: placement
        for fqn, placement in part.placements.items()
        if isinstance(placement, Shard) and fqn not in of_linears
    }
    return replace(part, placements=placements), features, further


def _key(part: Part) -> tuple[object, ...]:
    return part.group.role, part.group.columns, part.group.rows
