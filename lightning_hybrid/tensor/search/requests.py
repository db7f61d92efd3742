"""The user's tensor plan: patterns of FQNs, and the styles that they request.

    {"model.layers.*.mlp.up_proj": "colwise", "model.layers.*.mlp.down_proj": "rowwise"}

Names are matched component by component. A component ``*`` matches one or more components; ``*``, ``?`` and ``[...]``
inside a component match as in file names. A pattern that matches no full FQN is matched against the end of FQNs, as if
it began with ``*.``. Of several patterns that name one module, the last counts.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

from torch import nn

from lightning_hybrid.errors import TensorPlanError
from lightning_hybrid.tensor.plan import SequenceParallel, UnitPlan
from lightning_hybrid.tensor.search.dataflow import may_be_linear
from lightning_hybrid.text import meant_of

Wanted = Literal["column", "row", "gathered", "replicated"]

STYLES: Mapping[str, Wanted] = {
    "colwise": "column",
    "rowwise": "row",
    "colwise_gather_output": "gathered",
    "colwise_rep": "gathered",
    "replicated": "replicated",
    "none": "replicated",
}


class Request(NamedTuple):
    """The request of a plan for one module."""

    wanted: Wanted  # its role, or "replicated"
    entry: str  # the entry of the plan, as the user wrote it


def check_styles(plan: Any) -> None:
    """Checks the types and styles of the user's plan.

    Raises:
        TypeError: It is no mapping of str to str.
        TensorPlanError: A style is unknown.
    """
    if not isinstance(plan, Mapping) or not all(isinstance(text, str) for pair in plan.items() for text in pair):
        raise TypeError(
            f"tensor_parallel_plan={plan!r}; use a dict of module names and styles, such as"
            " {'model.layers.*.mlp.up_proj': 'colwise', 'model.layers.*.mlp.down_proj': 'rowwise'}"
        )
    for pattern, style in plan.items():
        if style not in STYLES:
            raise TensorPlanError(
                f"tensor_parallel_plan has style {style!r} for {pattern!r}; use one of {', '.join(STYLES)}",
                entry="plan-style",
            )


def requests_of_user(root: nn.Module, plan: Mapping[str, str]) -> dict[str, Request]:
    """Resolves the user's plan to requests, by FQN in the root of each module that has parameters of its own.

    Raises:
        TensorPlanError: A pattern matches no module, or none that could be sharded so.
    """
    modules = {fqn: module for fqn, module in root.named_modules(remove_duplicate=False) if fqn}
    found: dict[str, Request] = {}
    for pattern, style in plan.items():
        request = Request(STYLES[style], f"{pattern!r}: {style!r}")
        matched = _matching(pattern, modules)
        if not matched:
            linears = [fqn for fqn, module in modules.items() if may_be_linear(module)]
            names = list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", fqn) for fqn in linears))
            raise TensorPlanError(
                f"tensor_parallel_plan names {pattern!r}, which is no module{meant_of(pattern, names)}",
                entry="plan-name",
            )
        if request.wanted == "replicated":
            named = [fqn for fqn in modules if any(fqn == top or fqn.startswith(top + ".") for top in matched)]
        else:
            named = [fqn for fqn in matched if may_be_linear(modules[fqn])]
            if not named:
                first = modules[matched[0]]
                raise TensorPlanError(
                    f"tensor_parallel_plan has {request.entry}, which names {len(matched)} modules, such as"
                    f" {matched[0]} ({type(first).__name__}), and none that multiplies by one weight; name the linears",
                    entry="plan-no-linear",
                )
        found |= {fqn: request for fqn in named if next(modules[fqn].parameters(recurse=False), None) is not None}
    return found


def _matching(pattern: str, names: Iterable[str]) -> list[str]:
    components = pattern.split(".")
    split = {name: name.split(".") for name in names}
    return [n for n in split if _covers(components, split[n])] or [
        n for n in split if _covers(["*", *components], split[n])
    ]


def _covers(pattern: Sequence[str], name: Sequence[str]) -> bool:
    if not pattern or not name:
        return not pattern and not name
    if pattern[0] == "*":
        return any(_covers(pattern[1:], name[start:]) for start in range(1, len(name) + 1))
    return fnmatchcase(name[0], pattern[0]) and _covers(pattern[1:], name[1:])


def requests_of_model(root: nn.Module) -> dict[str, Request]:
    """Resolves the plans that modules carry (as transformers' models do) to requests, by FQN in the root.

    Their names are relative to the module that has the plan, and ``*`` stands for a number. The outermost plan counts.
    Styles that are not for one linear (experts, sequences, fused ones, embeddings) are left to the search.
    """
    found: dict[str, Request] = {}
    for owner, module in root.named_modules():
        plan = _plan_of_module(module)
        if not plan:
            continue
        for fqn, inner in module.named_modules(remove_duplicate=False):
            style = plan.get(fqn, plan.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", fqn)))
            wanted = STYLES.get(style) if isinstance(style, str) else None
            if wanted not in (None, "replicated") and may_be_linear(inner):
                full = f"{owner}.{fqn}" if owner else fqn
                found.setdefault(full, Request(wanted, f"{fqn!r}: {style!r}"))
    return found


def _plan_of_module(module: nn.Module) -> Mapping[str, Any]:
    plans: list[Any] = []
    with contextlib.suppress(Exception):  # properties of user code may raise
        plans.append(getattr(module, "_tp_plan", None))
        # The configuration has the plan of the model without a head; the model's own includes those of its children.
        if getattr(module, "base_model", None) is module:
            plans.append(getattr(getattr(module, "config", None), "base_model_tp_plan", None))
    merged: dict[str, Any] = {}
    for plan in reversed(plans):
        if isinstance(plan, Mapping):
            merged |= plan
    return merged


@dataclass(frozen=True)
class UnitRequests:
    """The requests for the modules of one unit."""

    unit: str = ""  # FQN of the unit in the root
    by_user: Mapping[str, Request] = field(default_factory=dict)  # requests of the user's plan, by FQN inside the unit
    by_model: Mapping[str, Request] = field(default_factory=dict)  # of the model's plan, where by_user has none

    @property
    def key(self) -> Hashable:
        """A key that is equal for units with the same requests."""
        return tuple(
            tuple((fqn, request.wanted) for fqn, request in requested.items())
            for requested in (self.by_user, self.by_model)
        )

    def named(self, fqn: str) -> str:
        """The FQN in the root of a module of the unit."""
        return ".".join(name for name in (self.unit, fqn) if name)

    def replicated(self, unit: nn.Module) -> dict[str, str]:
        """The parameters that the user wants replicated, each with the reason, by FQN inside the unit."""
        return {
            f"{fqn}.{name}" if fqn else name: f"your plan has {request.entry}"
            for fqn, request in self.by_user.items()
            if request.wanted == "replicated"
            for name, _ in unit.get_submodule(fqn).named_parameters(recurse=False)
        }


@dataclass(frozen=True)
class UnitTask:
    """What a plan of a unit is searched for."""

    unit: nn.Module  # the user's unit
    size: int  # number of tensor ranks
    context: int = 1  # number of context ranks
    sequence_parallel: SequenceParallel = None  # "tensor" to shard positions over tensor ranks between regions
    requests: UnitRequests = UnitRequests()  # the requests of plans for its modules
    vocabulary: Mapping[str, int] = field(default_factory=dict)  # parameters to shard by vocabulary: FQN -> dim
    excluded: Mapping[str, str] = field(default_factory=dict)  # parameters that stay replicated, each with the reason

    def unsharded(self, reason: str) -> UnitPlan:
        """The plan that replicates everything."""
        return UnitPlan.unsharded(self.unit, self.size, reason)


def requests_by_unit(
    root: nn.Module, units: Mapping[str, nn.Module], by_user: Mapping[str, Request], by_model: Mapping[str, Request]
) -> dict[str, UnitRequests]:
    """Assigns the requests to units.

    Raises:
        TensorPlanError: The user wants to shard a module that is in no unit.
    """
    locations = {id(module): (fqn, inside) for fqn, unit in units.items() for inside, module in unit.named_modules()}
    modules = dict(root.named_modules(remove_duplicate=False))
    requested: dict[str, tuple[dict[str, Request], dict[str, Request]]] = {fqn: ({}, {}) for fqn in units}
    for fqn, request in by_user.items():
        unit, inside = locations.get(id(modules[fqn]), (None, ""))
        if unit is not None:
            requested[unit][0][inside] = request
        elif request.wanted != "replicated":
            raise TensorPlanError(
                f"tensor_parallel_plan has {request.entry}, which names {fqn}; the step does not call it inside of a"
                " layer, so it stays replicated; leave it out of the plan",
                entry="plan-outside",
            )
    for fqn, request in by_model.items():
        unit, inside = locations.get(id(modules[fqn]), (None, ""))
        if unit is not None and inside not in requested[unit][0]:
            requested[unit][1][inside] = request
    return {fqn: UnitRequests(fqn, *both) for fqn, both in requested.items()}


def check_followed(plan_requests: UnitRequests, plan: UnitPlan) -> None:
    """Checks that a unit's plan follows the user's requests.

    Raises:
        TensorPlanError: A linear has another role.
    """
    for fqn, request in plan_requests.by_user.items():
        if request.wanted == "replicated" or plan.roles.get(fqn) == request.wanted:
            continue
        prefix = f"{fqn}." if fqn else ""
        reason = next(
            (why for name, why in plan.replicated_reasons.items() if name.startswith(prefix)),
            "its region was not proved",
        )
        if any(fqn.startswith(f"{other}.") for other, role in plan.roles.items() if role == "attention"):
            reason = "it belongs to an nn.MultiheadAttention, which is sharded by heads as one"
        elif reason == "no weight of a linear":
            reason = "it did not run, or did not multiply its input by its weight"
        raise TensorPlanError(
            f"tensor_parallel_plan has {request.entry}, but {plan_requests.named(fqn)} cannot be sharded like that:"
            f" {reason}; leave it out of the plan, or make it replicated",
            entry="plan-shard",
        )
