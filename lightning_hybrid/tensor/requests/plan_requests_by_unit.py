"""The requests for the modules of a unit: by the user's plan, then by the one that the model brings along.

A plan fixes the role of linears. For each authority in the same way, a run shows which linears belong together, trials
find how their features are arranged, and all is proved. A request of the user is done or refused; one of the model's
plan that cannot be proved is dropped, with a line in the table.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from lightning_hybrid.errors import TensorPlanError
from lightning_hybrid.tensor.plan.unit_plan import UnitPlan
from lightning_hybrid.tensor.requests.user_plan import Request

Origin = Literal["your plan", "the model's own plan", "found"]


@dataclass(frozen=True)
class UnitRequests:
    """The requests for the modules of one unit.

    Attributes:
        unit: FQN of the unit in the root.
        by_user: Requests of the user's plan, by FQN inside the unit.
        by_model: Requests of the model's own plan for modules that the user's plan does not name.
    """

    unit: str = ""
    by_user: Mapping[str, Request] = field(default_factory=dict)
    by_model: Mapping[str, Request] = field(default_factory=dict)

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


def requests_by_unit(
    root: nn.Module, units: Mapping[str, nn.Module], by_user: Mapping[str, Request], by_model: Mapping[str, Request]
) -> dict[str, UnitRequests]:
    """Assigns the requests to units.

    Args:
        root: The user's module.
        units: Its tensor units, by FQN.
        by_user: Requests of the user's plan, by FQN in the root.
        by_model: Requests of the model's own plan.

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
