"""The search over all units of a model: like ones share a plan."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

from torch import Tensor, nn

from lightning_hybrid.parts.placement import Shard
from lightning_hybrid.step.objects.pytree import flatten
from lightning_hybrid.step.recording.unit_dedup import UnitKinds
from lightning_hybrid.step.standins.absent_tensors import whole_shape
from lightning_hybrid.step.tracing.compiled_modules import compiled_modules
from lightning_hybrid.tensor.discovery.unit_calls import Calls
from lightning_hybrid.tensor.discovery.vocabulary_uses import Use, VocabularyCut, choose_cuts
from lightning_hybrid.tensor.plan.unit_plan import Deal, UnitPlan
from lightning_hybrid.tensor.requests.precedence import Wishes, check_done
from lightning_hybrid.tensor.requests.user_plan import TensorPlanError
from lightning_hybrid.tensor.search.unit_search import plan_unit
from lightning_hybrid.tensor.search.vocabulary_loss_proof import cross_entropy_failure

_PLAIN = (bool, int, float, str, type(None))
# A linear that stands alone and is so many times smaller than the module costs more messages than it saves memory.
_SMALL_SHARE = 64
_FEW_SHARE = 8  # unless all such linears together are more than this share of it


def plan_units(
    root: nn.Module,
    units: Mapping[str, nn.Module],
    calls: Calls,
    read_by_step: Mapping[str, str],
    size: int,
    find: Callable[..., UnitPlan] = plan_unit,
    deal: Deal = None,
    context: int = 1,
    wishes: Mapping[str, Wishes] | None = None,
    uses: Mapping[str, Use] | None = None,
    watched: Collection[nn.Module] = (),
) -> dict[str, UnitPlan]:
    """A proved plan for each unit.

    Args:
        root: The user's module.
        units: Its tensor units, by FQN.
        calls: How the step calls them.
        read_by_step: Parameters that the step reads outside of units, each with the line of code, by FQN in the root.
        size: Number of tensor ranks.
        find: Plans one unit.
        deal: As for ``plan_unit``.
        context: Number of context ranks.
        wishes: What plans ask for each unit.
        uses: What the step does with each parameter, by its first FQN in the root; what is cut by vocabulary follows.
        watched: The step's units; what the user compiled around them runs as it is written.

    Raises:
        TensorPlanError: The user's plan cannot be followed, or is not proved.
    """
    cuts, kept = choose_cuts(root, uses or {}, size)
    said = _said_by_user(root, units, wishes or {})
    kept |= {name: reason for name, reason in _small_alone(root, units).items() if name not in {*said, *cuts}}
    cuts = {name: cut for name, cut in cuts.items() if name not in said}
    parameters = dict(root.named_parameters())
    heads = {name: parameters[name].shape[cut.dim] for name, cut in cuts.items() if cut.is_head}
    compiled = compiled_modules(root, watched)
    failures = {length: cross_entropy_failure(length, size) for length in set(heads.values())}
    wrong = {name: failures[length] for name, length in heads.items()}
    kept |= {name: failure for name, failure in wrong.items() if failure is not None}
    cuts = {name: cut for name, cut in cuts.items() if name not in kept}
    while True:
        finder = partial(find, deal=deal, context=context)
        plans = _planned(root, units, calls, read_by_step, size, finder, wishes or {}, cuts, kept, compiled)
        refused = _refused(root, units, calls, plans, cuts)
        if not refused:
            return plans
        # A weight is cut in all of its units or in none.
        kept |= refused
        cuts = {name: cut for name, cut in cuts.items() if name not in refused}


def _small_alone(root: nn.Module, units: Mapping[str, nn.Module]) -> dict[str, str]:
    """Weights that would be cut with their output gathered, and are not worth that; by first FQN in the root."""
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    all_numbers = sum(prod(whole_shape(parameter)) for parameter in root.parameters())
    # Not `unit.weight`: where that is computed, asking for it may write buffers (spectral_norm's).
    own = [unit._parameters.get("weight") for unit in units.values() if isinstance(unit, nn.Linear)]
    alone = [weight for weight in own if weight is not None]
    small = [weight for weight in alone if prod(whole_shape(weight)) * _SMALL_SHARE < all_numbers]
    if sum(prod(whole_shape(weight)) for weight in small) * _FEW_SHARE > all_numbers:
        return {}
    return {names[id(weight)]: f"less than 1/{_SMALL_SHARE} of the module, and alone" for weight in small}


def _planned(
    root: nn.Module,
    units: Mapping[str, nn.Module],
    calls: Calls,
    read_by_step: Mapping[str, str],
    size: int,
    find: Callable[..., UnitPlan],
    wishes: Mapping[str, Wishes],
    cuts: Mapping[str, VocabularyCut],
    kept: Mapping[str, str],
    compiled: Collection[int],
) -> dict[str, UnitPlan]:
    shared = _shared(root, units)
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    elsewhere = {names[key] for key in _outside_of_units(root, units)}
    plans: dict[str, UnitPlan] = {}
    known: dict[Hashable, UnitPlan] = {}
    kinds = UnitKinds()
    for fqn, unit in units.items():
        asked = wishes.get(fqn, Wishes(fqn))
        whole: dict[str, str] = {}
        vocabulary: dict[str, int] = {}
        for name, parameter in unit.named_parameters():
            full = f"{fqn}.{name}"
            first = names[id(parameter)]
            if first in cuts:
                vocabulary[name] = cuts[first].dim
            elif first in kept:
                whole[name] = kept[first]
            elif id(parameter) in shared:
                whole[name] = "used by several units"
            elif full in read_by_step:
                whole[name] = f"read by the step at {read_by_step[full]}"
            elif name in calls.read_outside.get(fqn, ()):
                whole[name] = "read outside of its unit"
        if any(id(module) in compiled for module in unit.modules()):
            why = "torch.compile has made one function of it, which cannot be cut; compile='units' compiles each layer"
            plans[fqn] = UnitPlan.whole(unit, size, why)
            check_done(asked, plans[fqn])
            continue
        if fqn not in calls.arguments:
            plan = UnitPlan.whole(unit, size, "the step does not call it")
            plans[fqn] = _with_slices(plan, unit, vocabulary) if vocabulary else plan
            continue
        args, kwargs = calls.arguments[fqn]
        options = {"whole": whole, "vocabulary": vocabulary} if vocabulary else {"whole": whole}
        key = (
            *(kinds.kind_of(fqn, unit), _call_key(args, kwargs), asked.key),
            *(tuple(whole.items()), tuple(vocabulary.items())),
        )
        if key in known:
            plan = replace(known[key], num_trials=0, seconds=0.0)
        else:
            found = _found(find, unit, args, kwargs, size, {**options, "wishes": asked})
            plan = known[key] = _without_cut_buffers(unit, found)
            check_done(asked, plan)
        firsts = {name: names[id(unit.get_parameter(name))] for name in plan.vocabulary}
        outside = [name for name, first in firsts.items() if cuts[first].outside or first in elsewhere]
        plans[fqn] = replace(plan, outside=tuple(outside))
    return plans


def _said_by_user(root: nn.Module, units: Mapping[str, nn.Module], wishes: Mapping[str, Wishes]) -> set[str]:
    """First FQNs in the root of parameters that the user's plan speaks of."""
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    found: set[str] = set()
    for fqn, asked in wishes.items():
        inside = dict(units[fqn].named_parameters())
        found |= {names[id(inside[name])] for name in asked.whole(units[fqn]) if name in inside}
        for inner in asked.yours:
            found |= {names[id(parameter)] for parameter in units[fqn].get_submodule(inner).parameters()}
    return found


def _refused(
    root: nn.Module,
    units: Mapping[str, nn.Module],
    calls: Calls,
    plans: Mapping[str, UnitPlan],
    cuts: Mapping[str, VocabularyCut],
) -> dict[str, str]:
    """Why some of what several units share by vocabulary cannot be cut after all, by first FQN in the root."""
    refused: dict[str, str] = {}
    shared = _shared(root, units)
    for name, parameter in root.named_parameters():
        if name not in cuts or not (id(parameter) in shared or cuts[name].outside):
            continue
        for fqn, unit in units.items():
            for inner, held in unit.named_parameters():
                if held is parameter and fqn in calls.arguments and inner not in plans[fqn].vocabulary:
                    reason = plans[fqn].kept.get(inner, "it is cut in another way there")
                    refused[name] = f"used by several units, and by {fqn} not by its vocabulary: {reason}"
    return refused


def _with_slices(plan: UnitPlan, unit: nn.Module, vocabulary: Mapping[str, int]) -> UnitPlan:
    """Another step may call it: it holds parts of what others use by vocabulary, and works with slices."""
    cuts = {
        name: Shard.unevenly(dim, unit.get_parameter(name).shape[dim], plan.size) for name, dim in vocabulary.items()
    }
    kept = {name: reason for name, reason in plan.kept.items() if name not in cuts}
    return replace(plan, placements={**plan.placements, **cuts}, vocabulary=vocabulary, kept=kept)


def _found(
    find: Callable[..., UnitPlan], unit: nn.Module, args: Any, kwargs: Any, size: int, options: Mapping[str, Any]
) -> UnitPlan:
    """A unit that cannot be tried stays whole, which is always right."""
    try:
        return find(unit, args, kwargs, size, **options)
    except TensorPlanError:
        raise
    except Exception as error:
        text = str(error).strip().splitlines() or [""]
        return UnitPlan.whole(unit, size, f"it cannot be tried: {type(error).__name__}: {text[0][:200]}")


def _shared(root: nn.Module, units: Mapping[str, nn.Module]) -> set[int]:
    """Ids of parameters that lie in several units, or also outside of one."""
    holders: dict[int, set[str]] = {}
    for fqn, unit in units.items():
        for parameter in unit.parameters():
            holders.setdefault(id(parameter), set()).add(fqn)
    for key in _outside_of_units(root, units):
        holders.setdefault(key, set()).add("")
    return {key for key, names in holders.items() if len(names) > 1}


def _outside_of_units(root: nn.Module, units: Mapping[str, nn.Module]) -> set[int]:
    """Ids of parameters that modules hold which are in no unit."""
    inside = {id(module) for unit in units.values() for module in unit.modules()}
    modules = [module for module in root.modules() if id(module) not in inside]
    return {id(parameter) for module in modules for parameter in module.parameters(recurse=False)}


def _without_cut_buffers(unit: nn.Module, plan: UnitPlan) -> UnitPlan:
    """A buffer is used as a view of the whole one, so that what a unit writes to its part is kept: one piece only."""
    buffers = {name for name, _ in unit.named_buffers()}
    for name, placement in plan.placements.items():
        if name in buffers and isinstance(placement, Shard) and len(placement.pieces) > 1:
            return UnitPlan.whole(unit, plan.size, f"buffer {name} would be cut in several pieces")
    return plan


def _call_key(args: Any, kwargs: Any) -> Hashable:
    leaves, _ = flatten((args, kwargs))
    return tuple(sorted(kwargs)), tuple(
        (tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
        if isinstance(leaf, Tensor)
        else leaf
        if isinstance(leaf, _PLAIN)
        else type(leaf)
        for leaf in leaves
    )
