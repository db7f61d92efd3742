"""The search over all units of a model: structurally equal units have one plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hybrid.errors import TensorPlanError
from lightning_hybrid.logits.sharded import represent
from lightning_hybrid.logits.vocabulary import Vocabulary
from lightning_hybrid.params.placement import Shard, join, shard_tensor
from lightning_hybrid.step.objects.pytree import flatten
from lightning_hybrid.step.recording.layers import UnitKinds
from lightning_hybrid.step.standins.tensors import full_shape
from lightning_hybrid.step.tracing.compiled import compiled_modules
from lightning_hybrid.tensor.plan import SequenceParallel, UnitPlan
from lightning_hybrid.tensor.proof.proof import TOLERANCE
from lightning_hybrid.tensor.proof.trials import ThreadRanks, TrialFailed, on_ranks
from lightning_hybrid.tensor.search.requests import UnitRequests, check_followed
from lightning_hybrid.tensor.search.unit import plan_unit
from lightning_hybrid.tensor.search.uses import UnitCalls, WeightUse

_PLAIN = (bool, int, float, str, type(None))
_COMPILED = "torch.compile has made it one function, which cannot be split; compile='units' compiles each layer"
# An unpaired linear that is so many times smaller than the module costs more messages than it saves memory.
_SMALL_SHARE = 64
_FEW_SHARE = 8  # unless all such linears together are more than this share of it
# A table with so many times fewer rows than the largest one (positions, token types) is not worth an all-reduce.
_SMALL_TABLE_FACTOR = 8
# Shards of different sizes need so many rows for each rank.
_UNEVEN_ROWS = 4
_WIDTH, _POSITIONS = 5, (3, 7)
_MAX_ROWS = 97


def plan_units(
    root: nn.Module,
    units: Mapping[str, nn.Module],
    calls: UnitCalls,
    read_by_step: Mapping[str, str],
    size: int,
    find: Callable[..., UnitPlan] = plan_unit,
    sequence_parallel: SequenceParallel = None,
    context: int = 1,
    plan_requests: Mapping[str, UnitRequests] | None = None,
    uses: Mapping[str, WeightUse] | None = None,
    step_units: Collection[nn.Module] = (),
) -> dict[str, UnitPlan]:
    """Searches a proved plan for each unit.

    Args:
        root: The user's module.
        units: Its tensor units, by FQN.
        calls: The calls of the units in the step.
        read_by_step: Parameters that the step reads outside of units, each with the line of code, by FQN in the root.
        size: Number of tensor ranks.
        find: Plans one unit.
        sequence_parallel: As for `plan_unit`.
        context: Number of context ranks.
        plan_requests: The requests of plans, by FQN of the unit.
        uses: The uses of each parameter in the step, by its first FQN in the root; they select vocabulary sharding.
        step_units: The step's units; modules that the user compiled around them run uncompiled.

    Raises:
        TensorPlanError: The user's plan cannot be followed, or is not proved.
    """
    shardings, replicated_reasons = choose_vocabulary_shardings(root, uses or {}, size)
    named = _named_by_user(root, units, plan_requests or {})
    replicated_reasons |= {
        name: reason for name, reason in _small_linears(root, units).items() if name not in {*named, *shardings}
    }
    shardings = {name: sharding for name, sharding in shardings.items() if name not in named}
    parameters = dict(root.named_parameters())
    heads = {name: parameters[name].shape[sharding.dim] for name, sharding in shardings.items() if sharding.is_head}
    compiled = compiled_modules(root, step_units)
    failures = {length: cross_entropy_failure(length, size) for length in set(heads.values())}
    wrong = {name: failures[length] for name, length in heads.items()}
    replicated_reasons |= {name: failure for name, failure in wrong.items() if failure is not None}
    replicated_reasons |= {name: "a hook of yours gets its gradient" for name, p in parameters.items() if _has_hook(p)}
    shardings = {name: sharding for name, sharding in shardings.items() if name not in replicated_reasons}
    while True:
        finder = partial(find, sequence_parallel=sequence_parallel, context=context)
        plans = _plan_each_unit(
            root, units, calls, read_by_step, size, finder, plan_requests or {}, shardings, replicated_reasons, compiled
        )
        refused = _refused(root, units, calls, plans, shardings)
        if not refused:
            return plans
        # A weight is sharded in all of its units or in none.
        replicated_reasons |= refused
        shardings = {name: sharding for name, sharding in shardings.items() if name not in refused}


def _has_hook(parameter: nn.Parameter) -> bool:
    """Whether code of the user is called with the gradient of a parameter; hooks of this package are idle meanwhile."""
    after = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return bool(parameter._backward_hooks) or not all(getattr(hook, "is_idle", False) for hook in after.values())


def _small_linears(root: nn.Module, units: Mapping[str, nn.Module]) -> dict[str, str]:
    """Weights of unpaired linears that are too small to shard with a gathered output; by first FQN in the root."""
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    all_numbers = sum(prod(full_shape(parameter)) for parameter in root.parameters())
    # Not `unit.weight`: where that is computed, asking for it may write buffers (spectral_norm's).
    weights = [unit._parameters.get("weight") for unit in units.values() if isinstance(unit, nn.Linear)]
    present = [weight for weight in weights if weight is not None]
    small = [weight for weight in present if prod(full_shape(weight)) * _SMALL_SHARE < all_numbers]
    if sum(prod(full_shape(weight)) for weight in small) * _FEW_SHARE > all_numbers:
        return {}
    return {names[id(weight)]: f"less than 1/{_SMALL_SHARE} of the module, and alone" for weight in small}


def _plan_each_unit(
    root: nn.Module,
    units: Mapping[str, nn.Module],
    calls: UnitCalls,
    read_by_step: Mapping[str, str],
    size: int,
    find: Callable[..., UnitPlan],
    plan_requests: Mapping[str, UnitRequests],
    shardings: Mapping[str, VocabularySharding],
    replicated_reasons: Mapping[str, str],
    compiled: Collection[int],
) -> dict[str, UnitPlan]:
    shared = _used_by_several(root, units)
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    elsewhere = {names[key] for key in _outside_of_units(root, units)}
    plans: dict[str, UnitPlan] = {}
    plan_of_key: dict[Hashable, UnitPlan] = {}
    kinds = UnitKinds()
    for fqn, unit in units.items():
        requested = plan_requests.get(fqn, UnitRequests(fqn))
        replicated: dict[str, str] = {}
        vocabulary: dict[str, int] = {}
        for name, parameter in unit.named_parameters():
            full_name = f"{fqn}.{name}"
            first = names[id(parameter)]
            if first in shardings:
                vocabulary[name] = shardings[first].dim
            elif first in replicated_reasons:
                replicated[name] = replicated_reasons[first]
            elif id(parameter) in shared:
                replicated[name] = "used by several units"
            elif full_name in read_by_step:
                replicated[name] = f"read by the step at {read_by_step[full_name]}"
            elif name in calls.read_outside.get(fqn, ()):
                replicated[name] = "read outside of its unit"
        if any(id(module) in compiled for module in unit.modules()):
            plans[fqn] = UnitPlan.unsharded(unit, size, _COMPILED)
            check_followed(requested, plans[fqn])
            continue
        if fqn not in calls.arguments:
            plan = UnitPlan.unsharded(unit, size, "the step does not call it")
            plans[fqn] = _with_vocabulary_shards(plan, unit, vocabulary) if vocabulary else plan
            continue
        args, kwargs = calls.arguments[fqn]
        extra = {"vocabulary": vocabulary} if vocabulary else {}
        find_unit = partial(find, keep_replicated=replicated, plan_requests=requested, **extra)
        key = (
            *(kinds.kind_of(fqn, unit), _call_key(args, kwargs), requested.key),
            *(tuple(replicated.items()), tuple(vocabulary.items())),
        )
        if key in plan_of_key:
            plan = replace(plan_of_key[key], num_trials=0, seconds=0.0)
        else:
            found = _try_plan(find_unit, unit, args, kwargs, size)
            plan = plan_of_key[key] = _without_fused_buffers(unit, found)
            check_followed(requested, plan)
        firsts = {name: names[id(unit.get_parameter(name))] for name in plan.vocabulary}
        outside = [name for name, first in firsts.items() if shardings[first].outside or first in elsewhere]
        plans[fqn] = replace(plan, outside=tuple(outside))
    return plans


def _named_by_user(
    root: nn.Module, units: Mapping[str, nn.Module], plan_requests: Mapping[str, UnitRequests]
) -> set[str]:
    """First FQNs in the root of parameters that the user's plan names."""
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    found: set[str] = set()
    for fqn, requested in plan_requests.items():
        inside = dict(units[fqn].named_parameters())
        found |= {names[id(inside[name])] for name in requested.replicated(units[fqn]) if name in inside}
        for inner in requested.by_user:
            found |= {names[id(parameter)] for parameter in units[fqn].get_submodule(inner).parameters()}
    return found


def _refused(
    root: nn.Module,
    units: Mapping[str, nn.Module],
    calls: UnitCalls,
    plans: Mapping[str, UnitPlan],
    shardings: Mapping[str, VocabularySharding],
) -> dict[str, str]:
    """Why weights that several units use by vocabulary cannot be sharded after all, by first FQN in the root."""
    refused: dict[str, str] = {}
    shared = _used_by_several(root, units)
    for name, parameter in root.named_parameters():
        if name not in shardings or not (id(parameter) in shared or shardings[name].outside):
            continue
        for fqn, unit in units.items():
            for inner, other in unit.named_parameters():
                if other is parameter and fqn in calls.arguments and inner not in plans[fqn].vocabulary:
                    reason = plans[fqn].replicated_reasons.get(inner, "it has another sharding there")
                    refused[name] = f"used by several units, and by {fqn} not by its vocabulary: {reason}"
    return refused


def _with_vocabulary_shards(plan: UnitPlan, unit: nn.Module, vocabulary: Mapping[str, int]) -> UnitPlan:
    """Shards the vocabularies of a unit that is not called: others use them, and another step may call it."""
    shardings = {
        name: Shard.unevenly(dim, unit.get_parameter(name).shape[dim], plan.size) for name, dim in vocabulary.items()
    }
    replicated_reasons = {name: reason for name, reason in plan.replicated_reasons.items() if name not in shardings}
    return replace(
        plan, placements={**plan.placements, **shardings}, vocabulary=vocabulary, replicated_reasons=replicated_reasons
    )


def _try_plan(find: Callable[..., UnitPlan], unit: nn.Module, args: Any, kwargs: Any, size: int) -> UnitPlan:
    """Plans a unit; one that cannot be tried stays replicated, which is always right."""
    try:
        return find(unit, args, kwargs, size)
    except TensorPlanError:
        raise
    except Exception as error:
        text = str(error).strip().splitlines() or [""]
        return UnitPlan.unsharded(unit, size, f"it cannot be tried: {type(error).__name__}: {text[0][:200]}")


def _used_by_several(root: nn.Module, units: Mapping[str, nn.Module]) -> set[int]:
    """Ids of parameters of several units, or of a unit and a module outside of units."""
    owners = [{id(parameter) for parameter in unit.parameters()} for unit in units.values()]
    counts = Counter(key for keys in (*owners, _outside_of_units(root, units)) for key in keys)
    return {key for key, count in counts.items() if count > 1}


def _outside_of_units(root: nn.Module, units: Mapping[str, nn.Module]) -> set[int]:
    """Ids of the parameters of modules that are in no unit."""
    inside = {id(module) for unit in units.values() for module in unit.modules()}
    modules = [module for module in root.modules() if id(module) not in inside]
    return {id(parameter) for module in modules for parameter in module.parameters(recurse=False)}


def _without_fused_buffers(unit: nn.Module, plan: UnitPlan) -> UnitPlan:
    """Replicates a unit with a buffer in several pieces: its shard must be a view of the full buffer, to be written."""
    buffers = {name for name, _ in unit.named_buffers()}
    for name, placement in plan.placements.items():
        if name in buffers and isinstance(placement, Shard) and len(placement.pieces) > 1:
            return UnitPlan.unsharded(unit, plan.size, f"buffer {name} would be sharded in several pieces")
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


@dataclass(frozen=True)
class VocabularySharding:
    """The vocabulary sharding of one weight.

    Attributes:
        dim: The dim that is sharded.
        outside: Whether code outside of its units uses it too.
        is_head: Whether it is multiplied by to make logits, or added to them.
    """

    dim: int
    outside: bool
    is_head: bool


def choose_vocabulary_shardings(
    root: nn.Module, uses: Mapping[str, WeightUse], size: int
) -> tuple[dict[str, VocabularySharding], dict[str, str]]:
    """Chooses the parameters to shard by vocabulary over `size` tensor ranks, from their uses in the step.

    Returns:
        The weights and biases to shard, and why other tables are not; by first FQN in the root.
    """
    parameters = dict(root.named_parameters())
    shardings: dict[str, VocabularySharding] = {}
    reasons: dict[str, str] = {}
    tables = [full_shape(parameters[name]) for name, use in uses.items() if use.is_table]
    largest = max(tables, key=prod, default=(0, 0))
    for name, use in uses.items():
        shape = full_shape(parameters[name])
        if not (use.is_table or use.is_head) or len(shape) != 2:
            continue
        if use.is_table and not use.is_head:
            if use.other:
                reasons[name] = use.other
                continue
            if shape[0] * _SMALL_TABLE_FACTOR <= largest[0] or prod(shape) * _SMALL_TABLE_FACTOR <= prod(largest):
                reasons[name] = f"a table of {shape[0]} rows, small beside one of {largest[0]}"
                continue
        if use.other or len(use.dims) != 1:
            continue
        (dim,) = use.dims
        # An untied head is worth it if only a loss reads its output, and that is larger than its input.
        if not use.is_table and (use.reads_others or not use.reads_loss or shape[dim] <= shape[1 - dim]):
            continue
        if shape[dim] <= shape[1 - dim]:
            reasons[name] = f"a table of {shape[dim]} rows of {shape[1 - dim]}: less than what ranks would send for it"
            continue
        if not _can_shard(shape[dim], size):
            reasons[name] = f"its vocabulary of {shape[dim]} rows is too small for {size} ranks"
            continue
        shardings[name] = VocabularySharding(dim, use.outside, use.is_head)
        for bias in use.biases:
            bias_use = uses[bias]
            is_bias_alone = not (bias_use.other or bias_use.is_table or bias_use.is_head)
            if is_bias_alone and full_shape(parameters[bias]) == (shape[dim],):
                shardings[bias] = VocabularySharding(0, bias_use.outside, is_head=True)
    return shardings, reasons


def _can_shard(length: int, size: int) -> bool:
    return length % size == 0 or (length >= _UNEVEN_ROWS * size and -(-length // size) * (size - 1) < length)


# The proof that a vocabulary-parallel cross entropy equals that of the full logits.
# Units are proved by themselves, and the loss is often in none of them. So this is done once for each size of a
# vocabulary, with a tied weight: it is both looked up and multiplied by.


def cross_entropy_failure(length: int, size: int) -> str | None:
    """Compares a vocabulary-parallel cross entropy of random float64 numbers; returns what is wrong, or None."""
    rows = length if length <= _MAX_ROWS * size else _MAX_ROWS * size + length % size
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    weight, bias, x = random(rows, _WIDTH), random(rows), random(*_POSITIONS, _WIDTH)
    tokens = torch.linspace(0, rows - 1, x[..., 0].numel()).long().view(_POSITIONS)
    targets = tokens.flip(0).clone()
    targets[0, 0] = targets[2, 3] = -100
    expected = _run(weight, bias, x, tokens, targets, None)

    def one(ranks: ThreadRanks) -> list[Tensor]:
        vocabulary = Vocabulary(rows, ranks)
        local = [shard_tensor(full, vocabulary.shard(0), ranks.rank, size) for full in (weight, bias)]
        return _run(local[0], local[1], x, tokens, targets, vocabulary)

    try:
        outcomes = on_ranks(size, one)
    except TrialFailed as failure:
        return str(failure)
    placement = Shard.unevenly(0, rows, size)
    for index, (name, wanted) in enumerate(zip(_NAMES, expected, strict=True)):
        each = [outcome[index] for outcome in outcomes]
        for found in [join(each, placement)] if "row" in name else each:
            distance = float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-3))
            if not distance <= TOLERANCE:
                return f"{name} of a vocabulary-parallel cross entropy: relative difference {distance:.1e}"
    return None


_NAMES = ("loss", "smoothed loss", "largest", "gradient of rows", "gradient of the rows' biases", "gradient of inputs")


def _run(
    weight: Tensor, bias: Tensor, x: Tensor, tokens: Tensor, targets: Tensor, vocabulary: Vocabulary | None
) -> list[Tensor]:
    inputs = [tensor.detach().clone().requires_grad_() for tensor in (weight, bias, x)]
    rows, row_biases, x = inputs
    if vocabulary is not None:
        rows, row_biases = represent(rows, 0, vocabulary), represent(row_biases, 0, vocabulary)
    logits = F.linear(F.embedding(tokens, rows) * 0.5 + x, rows, row_biases)
    shifted = logits[:, :-1].flatten(0, 1)
    loss = F.cross_entropy(shifted, targets[:, 1:].flatten())
    smooth = F.cross_entropy(logits.transpose(1, 2), targets, label_smoothing=0.1, reduction="sum")
    largest = logits.argmax(-1).double()
    return [loss.detach(), smooth.detach(), largest, *torch.autograd.grad(loss + smooth, inputs)]
