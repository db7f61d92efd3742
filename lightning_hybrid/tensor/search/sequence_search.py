"""The search for sequence parallelism in a unit, and its proof.

What is tried, beside which argument is the sequence and which of its dims holds the positions: whose code must be shown
the length of the whole sequence, because it writes it into a view (an attention module), and whose need not be. Which
values are dealt, and which parameters therefore have the gradients of some positions only, is read off a trial.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from lightning_hybrid.equivalence.output_differences import are_alike, difference_of, difference_of_sum
from lightning_hybrid.parts.placement import Replicated
from lightning_hybrid.tensor.plan.unit_plan import Axis, DealtBy, Group, PositionsPlan, UnitPlan
from lightning_hybrid.tensor.trial.equivalence_proof import LOOSE_TOLERANCE, TOLERANCE, Proof
from lightning_hybrid.tensor.trial.threaded_ranks import Outcome, beside, run_whole

# More combinations of whose code is shown the whole length are not tried.
_MOST_TRIALS = 16


def deal_positions(
    unit: nn.Module,
    plan: UnitPlan,
    proof: Proof,
    by: DealtBy,
    *,
    sequence: tuple[int, int] | None,
    guess: bool,
    prove: bool = True,
    like: UnitPlan | None = None,
) -> UnitPlan:
    """The plan with positions dealt; or as it was, with the reason why they are not.

    Args:
        unit: A copy of the unit with random weights.
        plan: Its proved plan; for context ranks, one that says which regions get their features by exchange.
        proof: Of the unit, on all ranks.
        by: Whether positions are dealt to tensor ranks, to context ranks, or to both.
        sequence: As `sequence_of` says.
        guess: Whether over which ranks the gradients of weights are summed is guessed, and not read off a trial.
        prove: Whether to prove it in all modes; else outputs and gradients were right in one.
        like: One that is dealt, in which some groups exchange that do not here, or the other way round: the code around
            all others is shown the same.
    """
    if sequence is None:
        return replace(plan, undealt="no argument of the unit has the shape of its result")
    place, dim = sequence
    reason = ""
    for shown in itertools.islice(_shown(unit, plan, by, like), _MOST_TRIALS):
        positions = PositionsPlan(by=by, place=place, dim=dim, num_dims=_num_dims(proof, place), shown=shown)
        dealt = _dealt(plan, positions, proof, guess=guess, prove=prove)
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


def _shown(unit: nn.Module, plan: UnitPlan, by: DealtBy, like: UnitPlan | None) -> Iterator[tuple[str, ...]]:
    """Modules to be shown the length of the whole sequence; for each group one around its columns, or none."""
    choices = []
    for group in plan.groups if by != "context" else filter(plan.exchanges, plan.groups):
        around = _around(group, unit)
        if like is not None and like.positions is not None and like.exchanges(group) == plan.exchanges(group):
            around = [next((fqn for fqn in around if fqn in like.positions.shown), None)]
        choices.append(around)
    for chosen in itertools.product(*choices):
        yield tuple(dict.fromkeys(fqn for fqn in chosen if fqn is not None))


def _around(group: Group, unit: nn.Module) -> list[str | None]:
    if group.role == "attention":
        return [None]
    paths = [fqn.split(".")[:-1] for fqn in group.columns]
    common = [names[0] for names in itertools.takewhile(lambda n: len(set(n)) == 1, zip(*paths, strict=False))]
    found = [".".join(common[:length]) for length in range(len(common), 0, -1)] or [""]
    callable_ones = [fqn for fqn in found if not isinstance(unit.get_submodule(fqn), nn.Sequential | nn.ModuleList)]
    return [*callable_ones, None]


def _dealt(plan: UnitPlan, positions: PositionsPlan, proof: Proof, *, guess: bool, prove: bool) -> UnitPlan | str:
    """The plan with these positions, completed by what a trial shows; or what is wrong with it."""
    if plan.positions is not None:
        positions = replace(positions, features=plan.positions.features, parts=plan.positions.parts)
    rules = dict(plan.rules)
    candidate = replace(plan, positions=positions, rules=rules)
    inputs: dict[str, tuple[int, ...]] = {}
    outputs: tuple[int, ...] = ()
    summed: dict[Axis, list[str]] = {"tensor": [], "context": []}
    guessed = [fqn for fqn, parameter in proof.unit.named_parameters() if parameter.dim() > 1] if guess else []
    # Code that runs in eval mode alone is shown positions too.
    settings = [proof.first] if proof.is_as_first(proof.evaluating) else [proof.first, proof.evaluating]
    for setting in settings:
        outcomes = proof.outcomes(candidate, setting, learning=True, without=guessed)
        if isinstance(outcomes, str):
            return outcomes
        dealing = proof.ranks.dealings[0]
        if dealing is None:
            return "nothing was dealt"
        for fqn, places in dealing.inputs.items():
            inputs[fqn] = tuple(sorted({*inputs.get(fqn, ()), *places}))
        outputs = dealing.outputs
        if setting == proof.first:
            wrong = _summed(candidate, outcomes, proof, guessed, summed)
            if wrong:
                return wrong
    if not outputs:
        return "no result of the unit has positions"
    changed = {site: rule for site, rule in rules.items() if rule and site not in plan.rules}
    dealt = replace(
        candidate,
        positions=replace(
            positions,
            inputs=inputs,
            outputs=outputs,
            summed_over_tensor=tuple(summed["tensor"]),
            summed_over_context=tuple(summed["context"]),
        ),
        watched=plan.watched or bool(changed),
    )
    return (proof.first_failure(dealt) if prove else None) or dealt


def _summed(
    plan: UnitPlan, outcomes: list[Outcome], proof: Proof, guessed: Collection[str], summed: dict[Axis, list[str]]
) -> str:
    """Note the parameters of which each rank has the gradient of its own positions; or say what is wrong with one.

    Args:
        plan: By which the ranks ran.
        outcomes: Of the ranks.
        proof: Of the unit.
        guessed: Of these the ranks have no gradients; that each has those of its positions alone is likely.
        summed: Filled: over which ranks their gradients are summed.
    """
    tolerance = TOLERANCE if proof.dtype is torch.float64 else LOOSE_TOLERANCE
    for name, wanted in proof.whole(proof.first).grads.items():
        if name in guessed:
            for axis in max(_sums(plan, name), key=len, default=()):
                summed[axis].append(name)
            continue
        sides = beside(outcomes, plan, name, "grads", wanted)
        if name not in plan.placements:  # an input, of which each rank must have all of the gradient
            errors = [difference_of(grad, wanted, tolerance) for grad in sides[0][0]]
            if wrong := next((error for error in errors if error is not None), None):
                return f"gradient of {name}: {wrong}"
            continue
        error: str | None = None
        for axes in _sums(plan, name):
            added = [(addends, part) for found, part in sides for addends in _added(found, axes, plan)]
            differences = (_difference(addends, part, tolerance, wanted) for addends, part in added)
            error = next((difference for difference in differences if difference is not None), None)
            if error is None:
                for axis in axes:
                    summed[axis].append(name)
                break
        if error is not None:
            return f"gradient of {name}, summed over ranks: {error}"
    return ""


def _difference(addends: list[Tensor], part: Tensor, tolerance: float, wanted: Tensor) -> str | None:
    if len(addends) > 1:
        return difference_of_sum(addends, part, tolerance, whole=wanted)
    return None if are_alike(addends[0], part, tolerance, whole=wanted) else "another one on each rank"


def _sums(plan: UnitPlan, name: str) -> list[tuple[Axis, ...]]:
    """Over which ranks the gradient of a parameter may have to be summed: least comes first."""
    assert plan.positions is not None
    over_tensor = plan.positions.by != "context" and plan.placements[name] == Replicated() and name not in plan.summed
    if plan.positions.by == "tensor":
        return [(), ("tensor",)] if over_tensor else []
    return [(), ("context",), ("tensor",), ("tensor", "context")] if over_tensor else [(), ("context",)]


def _added(found: list[Tensor], axes: tuple[Axis, ...], plan: UnitPlan) -> list[list[Tensor]]:
    """What ranks have of a gradient, as the sums over some axes add it up.

    Args:
        found: Of tensor ranks times context ranks, or of the context ranks of one tensor rank.
        axes: Over which is summed.
        plan: Of the unit.
    """
    context = len(found) if len(found) < plan.size * plan.context else plan.context
    rows = [found[start : start + context] for start in range(0, len(found), context)]  # one for each tensor rank
    if axes == ("tensor", "context"):
        return [found]
    if axes == ("tensor",):
        return [list(column) for column in zip(*rows, strict=True)]
    return rows if axes == ("context",) else [[grad] for grad in found]
