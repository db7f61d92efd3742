"""Plans all tensor units of a model: like ones share a plan, and what others read as well stays whole."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_hybrid.step.alike import unit_key
from lightning_hybrid.step.tree import flatten
from lightning_hybrid.tensor.authority import Wishes, check_done
from lightning_hybrid.tensor.find import plan_unit
from lightning_hybrid.tensor.patterns import TensorPlanError
from lightning_hybrid.tensor.placement import Shard
from lightning_hybrid.tensor.plan import Deal, UnitPlan
from lightning_hybrid.tensor.units import Calls, compiled_modules

_PLAIN = (bool, int, float, str, type(None))


def plan_units(
    root: nn.Module,
    units: Mapping[str, nn.Module],
    calls: Calls,
    read_by_step: Mapping[str, str],
    size: int,
    find: Callable[..., UnitPlan] = plan_unit,
    deal: Deal = None,
    wishes: Mapping[str, Wishes] | None = None,
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
        wishes: What plans ask for each unit.

    Raises:
        TensorPlanError: The user's plan cannot be followed, or is not proved.
    """
    shared, compiled = _shared(root, units), compiled_modules(root)
    plans: dict[str, UnitPlan] = {}
    known: dict[Hashable, UnitPlan] = {}
    for fqn, unit in units.items():
        asked = (wishes or {}).get(fqn, Wishes(fqn))
        whole: dict[str, str] = {}
        for name, parameter in unit.named_parameters():
            full = f"{fqn}.{name}"
            if id(parameter) in shared:
                whole[name] = "used by several units"
            elif full in read_by_step:
                whole[name] = f"read by the step at {read_by_step[full]}"
            elif name in calls.read_outside.get(fqn, ()):
                whole[name] = "read outside of its unit"
        if any(id(module) in compiled for module in unit.modules()):
            plans[fqn] = UnitPlan.whole(unit, size, "torch.compile has made one function of it, which cannot be cut")
            check_done(asked, plans[fqn])
            continue
        if fqn not in calls.arguments:
            plans[fqn] = UnitPlan.whole(unit, size, "the step does not call it")
            continue
        args, kwargs = calls.arguments[fqn]
        key = unit_key(fqn, unit), _call_key(args, kwargs), tuple(whole.items()), asked.key
        if key in known:
            plans[fqn] = replace(known[key], num_trials=0, seconds=0.0)
        else:
            found = _found(partial(find, deal=deal), unit, args, kwargs, size, whole, asked)
            plans[fqn] = known[key] = _without_cut_buffers(unit, found)
            check_done(asked, plans[fqn])
    return plans


def _found(
    find: Callable[..., UnitPlan],
    unit: nn.Module,
    args: Any,
    kwargs: Any,
    size: int,
    whole: Mapping[str, str],
    wishes: Wishes,
) -> UnitPlan:
    """A unit that cannot be tried stays whole, which is always right."""
    try:
        return find(unit, args, kwargs, size, whole=whole, wishes=wishes)
    except TensorPlanError:
        raise
    except Exception as error:
        text = str(error).strip().splitlines() or [""]
        return UnitPlan.whole(unit, size, f"it cannot be tried: {type(error).__name__}: {text[0][:200]}")


def _shared(root: nn.Module, units: Mapping[str, nn.Module]) -> set[int]:
    """Ids of parameters that lie in several units, or also outside of one."""
    inside = {id(module) for unit in units.values() for module in unit.modules()}
    holders: dict[int, set[str]] = {}
    for fqn, unit in units.items():
        for parameter in unit.parameters():
            holders.setdefault(id(parameter), set()).add(fqn)
    for module in root.modules():
        if id(module) not in inside:
            for parameter in module.parameters(recurse=False):
                holders.setdefault(id(parameter), set()).add("")
    return {key for key, names in holders.items() if len(names) > 1}


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
