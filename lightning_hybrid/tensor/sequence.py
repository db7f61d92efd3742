"""Finds how the positions of a unit's sequence can be dealt to the ranks, and proves it.

What is tried, beside which argument is the sequence and which of its dims holds the positions: whose code must be shown
the length of the whole sequence, because it writes it into a view (an attention module), and whose need not be. Which
values are dealt, and which parameters therefore have the gradients of some positions only, is read off a trial.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from lightning_hybrid.parts.placement import Replicated
from lightning_hybrid.tensor.compare import are_alike, difference_of, difference_of_sum
from lightning_hybrid.tensor.plan import Group, PositionsPlan, UnitPlan
from lightning_hybrid.tensor.prove import LOOSE_TOLERANCE, TOLERANCE, Proof
from lightning_hybrid.tensor.trial import Outcome, beside, run_whole

# More combinations of whose code is shown the whole length are not tried.
_MOST_TRIALS = 16


def deal_positions(
    unit: nn.Module,
    plan: UnitPlan,
    proof: Proof,
    by: Literal["tensor", "context"],
    *,
    sequence: tuple[int, int] | None,
    prove: bool = True,
) -> UnitPlan:
    """The plan with positions dealt; or as it was, with the reason why they are not.

    Args:
        unit: A copy of the unit with random weights.
        plan: Its proved plan; for "context", one that says which regions get their features by exchange.
        proof: Of the unit, on all ranks.
        by: Whether positions are dealt to tensor ranks, or to context ranks.
        sequence: As `sequence_of` says.
        prove: Whether to prove it in all modes; else outputs and gradients were right in one.
    """
    if sequence is None:
        return replace(plan, undealt="no argument of the unit has the shape of its result")
    place, dim = sequence
    reason = ""
    for shown in itertools.islice(_shown(unit, plan), _MOST_TRIALS):
        positions = PositionsPlan(by=by, place=place, dim=dim, num_dims=_num_dims(proof, place), shown=shown)
        dealt = _dealt(plan, positions, proof, prove=prove)
        if isinstance(dealt, UnitPlan):
            return dealt
        reason = reason or dealt
    return replace(plan, undealt=reason)


def sequence_of(proof: Proof) -> tuple[int, int] | None:
    """Which argument is the sequence, and which of its dims holds the positions; None if there is none."""
    results = {tuple(out.shape) for out in proof.whole(proof.first).outputs if isinstance(out, Tensor)}
    for place, leaf in enumerate(proof.example.leaves):
        # The first such argument is what flows through; others are beside it.
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and tuple(leaf.shape) in results:
            if leaf.dim() != 3:
                return (place, 0) if leaf.dim() == 2 else None
            return place, 0 if _mixes(proof, place, 0) and not _mixes(proof, place, 1) else 1
    return None


def _mixes(proof: Proof, place: int, dim: int) -> bool:
    """Whether the unit mixes values along a dim: samples of a batch are not mixed, positions mostly are.

    One place in the middle is changed; where values are mixed, results before or after it change too.
    """
    setting = replace(proof.first, grad=False)
    leaf = proof.example.leaves[place]
    middle, leaves = leaf.shape[dim] // 2, list(proof.example.leaves)
    leaves[place] = leaf.detach().clone()
    leaves[place].select(dim, middle).mul_(-0.5)
    changed = run_whole(proof.unit, replace(proof.example, leaves=tuple(leaves)), setting)
    others = [index for index in range(leaf.shape[dim]) if index != middle]
    pairs = zip(proof.whole(setting).outputs, changed.outputs, strict=True)
    alike = [(a, b) for a, b in pairs if isinstance(a, Tensor) and a.shape == leaf.shape == b.shape]
    return not all(torch.equal(a.select(dim, i), b.select(dim, i)) for a, b in alike for i in others)


def _num_dims(proof: Proof, place: int) -> int:
    return int(proof.example.leaves[place].dim())


def _shown(unit: nn.Module, plan: UnitPlan) -> Iterator[tuple[str, ...]]:
    """Modules to be shown the length of the whole sequence; for each group one around its columns, or none."""
    by_tensor = plan.positions is None
    choices = [_around(group, unit) for group in plan.groups if by_tensor or plan.exchanges(group)]
    for chosen in itertools.product(*choices):
        yield tuple(dict.fromkeys(fqn for fqn in chosen if fqn))


def _around(group: Group, unit: nn.Module) -> list[str]:
    if group.role == "attention":
        return [""]
    paths = [fqn.split(".")[:-1] for fqn in group.columns]
    common = [names[0] for names in itertools.takewhile(lambda n: len(set(n)) == 1, zip(*paths, strict=False))]
    found = [".".join(common[:length]) for length in range(len(common), 0, -1)]
    callable_ones = [fqn for fqn in found if not isinstance(unit.get_submodule(fqn), nn.Sequential | nn.ModuleList)]
    return [*callable_ones, ""]


def _dealt(plan: UnitPlan, positions: PositionsPlan, proof: Proof, *, prove: bool) -> UnitPlan | str:
    """The plan with these positions, completed by what a trial shows; or what is wrong with it."""
    if plan.positions is not None:
        positions = replace(positions, features=plan.positions.features, parts=plan.positions.parts)
    rules = dict(plan.rules)
    candidate = replace(plan, positions=positions, rules=rules)
    inputs: dict[str, tuple[int, ...]] = {}
    outputs: tuple[int, ...] = ()
    summed: tuple[str, ...] = ()
    # Code that runs in eval mode alone is shown positions too.
    for setting in (proof.first, proof.settings[-2]):
        outcomes = proof.outcomes(candidate, setting, learning=True)
        if isinstance(outcomes, str):
            return outcomes
        dealing = proof.ranks.dealings[0]
        if dealing is None:
            return "nothing was dealt"
        for fqn, places in dealing.inputs.items():
            inputs[fqn] = tuple(sorted({*inputs.get(fqn, ()), *places}))
        outputs = dealing.outputs
        if setting == proof.first:
            partial = _summed(candidate, outcomes, proof)
            if isinstance(partial, str):
                return partial
            summed = partial
    if not outputs:
        return "no result of the unit has positions"
    changed = {site: rule for site, rule in rules.items() if rule and site not in plan.rules}
    dealt = replace(
        candidate,
        positions=replace(positions, inputs=inputs, outputs=outputs, summed=summed),
        watched=plan.watched or bool(changed),
    )
    return (proof.first_failure(dealt) if prove else None) or dealt


def _summed(plan: UnitPlan, outcomes: list[Outcome], proof: Proof) -> tuple[str, ...] | str:
    """The parameters of which each rank has the gradient of its own positions; of a part of them, if they are cut."""
    tolerance = TOLERANCE if proof.dtype is torch.float64 else LOOSE_TOLERANCE
    summed = []
    for name, wanted in proof.whole(proof.first).grads.items():
        sides = beside(outcomes, plan, name, "grads", wanted)
        if name not in plan.placements:  # an input, of which each rank must have all of the gradient
            errors = [difference_of(grad, wanted, tolerance) for grad in sides[0][0]]
            if wrong := next((error for error in errors if error is not None), None):
                return f"gradient of {name}: {wrong}"
            continue
        if plan.context > 1:
            sides = [(found[: plan.context], part) for found, part in sides]  # tensor ranks have the same
        elif not isinstance(plan.placements[name], Replicated) or name in plan.summed:
            continue
        if all(are_alike(grad, part, tolerance, whole=wanted) for found, part in sides for grad in found):
            continue
        for found, part in sides:
            if (error := difference_of_sum(found, part, tolerance, whole=wanted)) is not None:
                return f"gradient of {name}, summed over ranks: {error}"
        summed.append(name)
    return tuple(summed)
