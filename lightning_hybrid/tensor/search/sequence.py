"""The search for sequence parallelism in a unit, and its proof.

It decides which argument is the sequence, which of its dims holds the positions, and which modules must see the length
of the full sequence because their code writes it into a view (an attention module). A trial then shows which values are
sharded, and which parameters therefore have the gradients of local positions only.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from lightning_hybrid.equivalence.difference import are_equal_within, difference_of, difference_of_sum
from lightning_hybrid.params.placement import Replicated
from lightning_hybrid.tensor.plan import (
    NOT_A_MULTIPLE,
    RING,
    Axis,
    Group,
    PositionsPlan,
    SequenceAxes,
    UnitPlan,
)
from lightning_hybrid.tensor.proof.proof import LOOSE_TOLERANCE, TOLERANCE, Proof
from lightning_hybrid.tensor.proof.trials import Outcome, local_and_expected, run_unsharded

# The largest number of choices of modules that see the full length that are tried.
_MAX_TRIALS = 16

NO_SEQUENCE = "no argument of the unit has the shape of its result"
NOTHING_SHARDED = "nothing was sharded"


def plan_sequence(
    unit: nn.Module,
    plan: UnitPlan,
    proof: Proof,
    by: SequenceAxes,
    *,
    sequence: tuple[int, int] | None,
    guess: bool,
    prove: bool = True,
    same_as: UnitPlan | None = None,
) -> UnitPlan:
    """Shards the sequence of a unit; returns the new plan, or the given one with the reason why it is not sharded.

    A guess says over which ranks the gradients of weights are summed, instead of comparing sums. Without proof, outputs
    and gradients were compared in one setting. Modules around groups that exchange in ``same_as`` too see what they see
    there.
    """
    if sequence is None:
        return replace(plan, full_sequence_reason=NO_SEQUENCE)
    leaf_index, dim = sequence
    num_dims = int(proof.example.leaves[leaf_index].dim())
    reason = ""
    for shown in itertools.islice(_full_length_choices(unit, plan, by, same_as), _MAX_TRIALS):
        positions = PositionsPlan(by=by, leaf_index=leaf_index, dim=dim, num_dims=num_dims, shown=shown)
        sharded = _sharded(plan, positions, proof, guess=guess, prove=prove)
        if isinstance(sharded, UnitPlan):
            return sharded
        reason = reason or sharded
    return replace(plan, full_sequence_reason=_in_words(plan, by, reason))


def _in_words(plan: UnitPlan, by: SequenceAxes, failure: str) -> str:
    """Why no trial was right: attention outside of regions has to see all positions."""
    heads: dict[int, list[str]] = {}
    for fqn, (count, what) in plan.uneven.items():
        if what == "heads":
            heads.setdefault(count, []).append(fqn or "it")
    if by == "context" or not heads:
        return failure
    each = [f"{n} heads of {', '.join(names)} are {NOT_A_MULTIPLE} {plan.size} ranks" for n, names in heads.items()]
    return f"{'; '.join(each)}, so each rank runs this attention, which needs all positions"


def find_sequence(proof: Proof) -> tuple[int, int] | None:
    """Finds the leaf index of the sequence among the arguments, and its dim of positions; None if there is none."""
    results = {tuple(out.shape) for out in proof.reference(proof.first).outputs if isinstance(out, Tensor)}
    for leaf_index, leaf in enumerate(proof.example.leaves):
        # The first such argument is the hidden state; others are additional inputs.
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and tuple(leaf.shape) in results:
            if leaf.dim() != 3:
                return (leaf_index, 0) if leaf.dim() == 2 else None
            return leaf_index, 0 if _mixes(proof, leaf_index, 0) and not _mixes(proof, leaf_index, 1) else 1
    return None


def _mixes(proof: Proof, leaf_index: int, dim: int) -> bool:
    """Whether the unit mixes values along a dim: samples of a batch are not mixed, positions mostly are.

    One index in the middle is changed; where values are mixed, results before or after it change too.
    """
    setting = replace(proof.first, grad=False)
    leaf = proof.example.leaves[leaf_index]
    middle, leaves = leaf.shape[dim] // 2, list(proof.example.leaves)
    leaves[leaf_index] = leaf.detach().clone()
    leaves[leaf_index].select(dim, middle).mul_(-0.5)
    changed = run_unsharded(proof.unit, replace(proof.example, leaves=tuple(leaves)), setting)
    others = [index for index in range(leaf.shape[dim]) if index != middle]
    pairs = zip(proof.reference(setting).outputs, changed.outputs, strict=True)
    compared = [(a, b) for a, b in pairs if isinstance(a, Tensor) and a.shape == leaf.shape == b.shape]
    return not all(torch.equal(a.select(dim, i), b.select(dim, i)) for a, b in compared for i in others)


def _full_length_choices(
    unit: nn.Module, plan: UnitPlan, by: SequenceAxes, same_as: UnitPlan | None
) -> Iterator[tuple[str, ...]]:
    """Yields choices of modules that see the full length: for each group one around its columns, or none."""
    choices = []
    for group in plan.groups if by != "context" else filter(plan.exchanges, plan.groups):
        around = _modules_around(group, unit)
        if same_as is not None and same_as.positions is not None and same_as.exchanges(group) == plan.exchanges(group):
            around = [next((fqn for fqn in around if fqn in same_as.positions.shown), None)]
        choices.append(around)
    for chosen in itertools.product(*choices):
        yield tuple(dict.fromkeys(fqn for fqn in chosen if fqn is not None))


def _modules_around(group: Group, unit: nn.Module) -> list[str | None]:
    if group.role == "attention":
        return [None]
    paths = [fqn.split(".")[:-1] for fqn in group.columns]
    common = [names[0] for names in itertools.takewhile(lambda n: len(set(n)) == 1, zip(*paths, strict=False))]
    found = [".".join(common[:length]) for length in range(len(common), 0, -1)] or [""]
    callable_ones = [fqn for fqn in found if not isinstance(unit.get_submodule(fqn), nn.Sequential | nn.ModuleList)]
    return [*callable_ones, None]


def _sharded(plan: UnitPlan, positions: PositionsPlan, proof: Proof, *, guess: bool, prove: bool) -> UnitPlan | str:
    """Completes the plan by what a trial with these positions shows; or returns what is wrong with it."""
    if plan.positions is not None:
        positions = replace(
            positions,
            features=plan.positions.features,
            parameter_shards=plan.positions.parameter_shards,
            ring_attention=plan.positions.ring_attention,
        )
    rules = dict(plan.rules)
    candidate = replace(plan, positions=positions, rules=rules)
    inputs: dict[str, tuple[int, ...]] = {}
    outputs: tuple[int, ...] = ()
    summed: dict[Axis, list[str]] = {"tensor": [], "context": []}
    guessed = [fqn for fqn, parameter in proof.unit.named_parameters() if parameter.dim() > 1] if guess else []
    # Code that runs only in eval mode sees local positions too.
    settings = [proof.first] if proof.runs_as_first(proof.eval_mode) else [proof.first, proof.eval_mode]
    for setting in settings:
        outcomes = proof.outcomes(candidate, setting, learning=True, without=guessed)
        if isinstance(outcomes, str):
            return outcomes
        sharding = None if proof.ranks.first_unit is None else proof.ranks.first_unit.last_sequence
        if sharding is None:
            return NOTHING_SHARDED
        for fqn, places in sharding.inputs.items():
            inputs[fqn] = tuple(sorted({*inputs.get(fqn, ()), *places}))
        outputs = sharding.outputs
        if setting == proof.first:
            failure = _find_summed(candidate, outcomes, proof, guessed, summed)
            if failure:
                return failure
    if not outputs:
        return "no result of the unit has positions"
    changed = {site: rule for site, rule in rules.items() if rule and site not in plan.rules and site[0] != RING}
    sharded = replace(
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
    return (proof.first_failure(sharded) if prove else None) or sharded


def _find_summed(
    plan: UnitPlan, outcomes: list[Outcome], proof: Proof, guessed: Collection[str], summed: dict[Axis, list[str]]
) -> str:
    """Collects the parameters whose gradients cover only local positions; returns what is wrong with one, or ""."""
    tolerance = TOLERANCE if proof.dtype is torch.float64 else LOOSE_TOLERANCE
    for name, wanted in proof.reference(proof.first).grads.items():
        if name in guessed:
            for axis in max(_summed_axes(plan, name), key=len, default=()):
                summed[axis].append(name)
            continue
        sides = local_and_expected(outcomes, plan, name, "grads", wanted)
        if name not in plan.placements:  # an input, of which each rank must have all of the gradient
            errors = [difference_of(grad, wanted, tolerance) for grad in sides[0][0]]
            if failure := next((error for error in errors if error is not None), None):
                return f"gradient of {name}: {failure}"
            continue
        error: str | None = None
        for axes in _summed_axes(plan, name):
            compared = [(addends, shard) for found, shard in sides for addends in _summands(found, axes, plan)]
            differences = (_difference(addends, shard, tolerance, wanted) for addends, shard in compared)
            error = next((difference for difference in differences if difference is not None), None)
            if error is None:
                for axis in axes:
                    summed[axis].append(name)
                break
        if error is not None:
            return f"gradient of {name}, summed over ranks: {error}"
    return ""


def _difference(addends: list[Tensor], shard: Tensor, tolerance: float, wanted: Tensor) -> str | None:
    if len(addends) > 1:
        return difference_of_sum(addends, shard, tolerance, full=wanted)
    return None if are_equal_within(addends[0], shard, tolerance, full=wanted) else "another one on each rank"


def _summed_axes(plan: UnitPlan, name: str) -> list[tuple[Axis, ...]]:
    """The axes over which the gradient of a parameter may have to be summed, fewest first."""
    over_tensor = plan.by != "context" and plan.placements[name] == Replicated() and name not in plan.summed
    if plan.by == "tensor":
        return [(), ("tensor",)] if over_tensor else []
    return [(), ("context",), ("tensor",), ("tensor", "context")] if over_tensor else [(), ("context",)]


def _summands(found: list[Tensor], axes: tuple[Axis, ...], plan: UnitPlan) -> list[list[Tensor]]:
    """Groups the local gradients of ranks into the addends of each sum over some axes."""
    context = len(found) if len(found) < plan.size * plan.context else plan.context
    rows = [found[start : start + context] for start in range(0, len(found), context)]  # one for each tensor rank
    if axes == ("tensor", "context"):
        return [found]
    if axes == ("tensor",):
        return [list(column) for column in zip(*rows, strict=True)]
    return rows if axes == ("context",) else [[grad] for grad in found]
