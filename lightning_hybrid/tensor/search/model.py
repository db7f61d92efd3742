"""The search over all units of a model: structurally equal units have one plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from torch import Tensor, nn

from lightning_hybrid.errors import TensorPlanError
from lightning_hybrid.params.placement import Shard
from lightning_hybrid.step.objects.pytree import flatten
from lightning_hybrid.step.recording.layers import UnitKinds
from lightning_hybrid.step.standins.tensors import full_shape
from lightning_hybrid.step.tracing.compiled import compiled_modules
from lightning_hybrid.tensor.plan import UnitPlan
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


class ModelSearch:
    """The search for a plan of each unit of a model."""

    def __init__(
        self,
        root: nn.Module,
        units: Mapping[str, nn.Module],
        calls: UnitCalls,
        read_by_step: Mapping[str, str],
        size: int,
        find: Callable[..., UnitPlan] = plan_unit,
        *,
        plan_requests: Mapping[str, UnitRequests] | None = None,
        uses: Mapping[str, WeightUse] | None = None,
        step_units: Collection[nn.Module] = (),
    ) -> None:
        """Chooses what is sharded by vocabulary, from the uses of parameters by their first FQN in the root.

        `units` are the tensor units by FQN, `read_by_step` parameters that the step reads outside of them, each with
        its line. `find` plans one unit, as `plan_unit`. Modules that the user compiled around `step_units` run
        uncompiled.
        """
        self._root, self._units, self._calls, self._read_by_step = root, units, calls, read_by_step
        self._size, self._find = size, find
        self._requests = {fqn: UnitRequests(fqn) for fqn in units} | dict(plan_requests or {})
        self._names = {id(parameter): name for name, parameter in root.named_parameters()}
        self._compiled = compiled_modules(root, step_units)
        inside = {id(module) for unit in units.values() for module in unit.modules()}
        others = (module for module in root.modules() if id(module) not in inside)
        self._outside = {id(parameter) for module in others for parameter in module.parameters(recurse=False)}
        owners = [{id(parameter) for parameter in unit.parameters()} for unit in units.values()]
        counts = Counter(key for keys in (*owners, self._outside) for key in keys)
        self._shared = {key for key, count in counts.items() if count > 1}  # by units, or a unit and other modules
        shardings, self._replicated = choose_vocabulary_shardings(root, uses or {}, size)
        named = self._named_by_user()
        small = _small_linears(root, units).items()
        self._replicated |= {name: reason for name, reason in small if name not in {*named, *shardings}}
        hooked = (self._names[id(parameter)] for parameter in root.parameters() if _has_hook(parameter))
        self._replicated |= dict.fromkeys(hooked, "a hook of yours gets its gradient")
        self._shardings = {n: each for n, each in shardings.items() if n not in named and n not in self._replicated}

    def plans(self) -> dict[str, UnitPlan]:
        """Searches a proved plan for each unit, by FQN.

        Raises:
            TensorPlanError: The user's plan cannot be followed, or is not proved.
        """
        while True:
            plans = self._plan_each_unit()
            refused = self._refused(plans)
            if not refused:
                return plans
            # A weight is sharded in all of its units or in none.
            self._replicated |= refused
            self._shardings = {name: each for name, each in self._shardings.items() if name not in refused}

    def _plan_each_unit(self) -> dict[str, UnitPlan]:
        plans: dict[str, UnitPlan] = {}
        plan_of_key: dict[Hashable, UnitPlan] = {}
        kinds = UnitKinds()
        for fqn, unit in self._units.items():
            requested = self._requests[fqn]
            replicated, vocabulary = self._fixed(fqn, unit)
            if any(id(module) in self._compiled for module in unit.modules()):
                plans[fqn] = UnitPlan.unsharded(unit, self._size, _COMPILED)
                check_followed(requested, plans[fqn])
                continue
            if fqn not in self._calls.arguments:
                plan = UnitPlan.unsharded(unit, self._size, "the step does not call it")
                plans[fqn] = _with_vocabulary_shards(plan, unit, vocabulary) if vocabulary else plan
                continue
            call = self._calls.arguments[fqn]
            fixed = tuple(replicated.items()), tuple(vocabulary.items())
            key = kinds.kind_of(fqn, unit), _call_key(*call), requested.key, fixed
            if key in plan_of_key:
                plan = replace(plan_of_key[key], num_trials=0, seconds=0.0)
            else:
                options = {"keep_replicated": replicated, "plan_requests": requested, "vocabulary": vocabulary}
                plan = plan_of_key[key] = _without_fused_buffers(unit, self._try_plan(unit, *call, **options))
                check_followed(requested, plan)
            plans[fqn] = replace(plan, outside=tuple(name for name in plan.vocabulary if self._is_outside(unit, name)))
        return plans

    def _fixed(self, fqn: str, unit: nn.Module) -> tuple[dict[str, str], dict[str, int]]:
        """The parameters of a unit that stay replicated, each with the reason, and those sharded by vocabulary."""
        replicated: dict[str, str] = {}
        vocabulary: dict[str, int] = {}
        for name, parameter in unit.named_parameters():
            first, full_name = self._names[id(parameter)], f"{fqn}.{name}"
            if first in self._shardings:
                vocabulary[name] = self._shardings[first].dim
            elif first in self._replicated:
                replicated[name] = self._replicated[first]
            elif id(parameter) in self._shared:
                replicated[name] = "used by several units"
            elif full_name in self._read_by_step:
                replicated[name] = f"read by the step at {self._read_by_step[full_name]}"
            elif name in self._calls.read_outside.get(fqn, ()):
                replicated[name] = "read outside of its unit"
        return replicated, vocabulary

    def _try_plan(self, unit: nn.Module, args: Any, kwargs: Any, **options: Any) -> UnitPlan:
        """Plans a unit; one that cannot be tried stays replicated, which is always right."""
        try:
            return self._find(unit, args, kwargs, self._size, **options)
        except TensorPlanError:
            raise
        except Exception as error:
            text = str(error).strip().splitlines() or [""]
            reason = f"it cannot be tried: {type(error).__name__}: {text[0][:200]}"
            return UnitPlan.unsharded(unit, self._size, reason)

    def _is_outside(self, unit: nn.Module, name: str) -> bool:
        """Whether code outside of the unit uses a parameter that is sharded by vocabulary."""
        parameter = unit.get_parameter(name)
        return self._shardings[self._names[id(parameter)]].outside or id(parameter) in self._outside

    def _named_by_user(self) -> set[str]:
        """First FQNs in the root of parameters that the user's plan names."""
        found: set[str] = set()
        for fqn, unit in self._units.items():
            for inner in self._requests[fqn].by_user:
                found |= {self._names[id(parameter)] for parameter in unit.get_submodule(inner).parameters()}
        return found

    def _refused(self, plans: Mapping[str, UnitPlan]) -> dict[str, str]:
        """Why weights that several units use by vocabulary cannot be sharded after all, by first FQN in the root."""
        refused: dict[str, str] = {}
        for fqn, unit in self._units.items():
            for inner, parameter in unit.named_parameters() if fqn in self._calls.arguments else ():
                name = self._names[id(parameter)]
                is_chosen = name in self._shardings and (id(parameter) in self._shared or self._shardings[name].outside)
                if is_chosen and inner not in plans[fqn].vocabulary:
                    reason = plans[fqn].replicated_reasons.get(inner, "it has another sharding there")
                    refused[name] = f"used by several units, and by {fqn} not by its vocabulary: {reason}"
        return refused


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


def _with_vocabulary_shards(plan: UnitPlan, unit: nn.Module, vocabulary: Mapping[str, int]) -> UnitPlan:
    """Shards the vocabularies of a unit that is not called: others use them, and another step may call it."""
    shardings = {
        name: Shard.unevenly(dim, unit.get_parameter(name).shape[dim], plan.size) for name, dim in vocabulary.items()
    }
    replicated_reasons = {name: reason for name, reason in plan.replicated_reasons.items() if name not in shardings}
    return replace(
        plan, placements={**plan.placements, **shardings}, vocabulary=vocabulary, replicated_reasons=replicated_reasons
    )


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
    """The vocabulary sharding of one weight."""

    dim: int  # the dim that is sharded
    outside: bool  # whether code outside of its units uses it too


def choose_vocabulary_shardings(
    root: nn.Module, uses: Mapping[str, WeightUse], size: int
) -> tuple[dict[str, VocabularySharding], dict[str, str]]:
    """Chooses the parameters to shard by vocabulary over `size` tensor ranks, and why other tables are not sharded."""
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
        shardings[name] = VocabularySharding(dim, use.outside)
        for bias in use.biases:
            bias_use = uses[bias]
            is_bias_alone = not (bias_use.other or bias_use.is_table or bias_use.is_head)
            if is_bias_alone and full_shape(parameters[bias]) == (shape[dim],):
                shardings[bias] = VocabularySharding(0, bias_use.outside)
    return shardings, reasons


def _can_shard(length: int, size: int) -> bool:
    return length % size == 0 or (length >= _UNEVEN_ROWS * size and -(-length // size) * (size - 1) < length)
