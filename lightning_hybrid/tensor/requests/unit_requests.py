"""Precedence of tensor plans: the user's, then the one that the model brings along, then the search's.

A plan fixes the role of linears. For each authority in the same way, a run shows which linears belong together, trials
find how their features are arranged, and all is proved. A request of the user is done or refused; one of the model's
plan that cannot be proved is dropped, with a line in the table.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from lightning_hybrid.tensor.discovery.linear_dataflow import LinearDataflow, Pair
from lightning_hybrid.tensor.plan.unit_plan import UnitPlan
from lightning_hybrid.tensor.requests.user_plan import Request, TensorPlanError

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
                " layer, so it stays replicated; leave it out of the plan"
            )
    for fqn, request in by_model.items():
        unit, inside = locations.get(id(modules[fqn]), (None, ""))
        if unit is not None and inside not in requested[unit][0]:
            requested[unit][1][inside] = request
    return {fqn: UnitRequests(fqn, *both) for fqn, both in requested.items()}


def requested_pairs(
    dataflow: LinearDataflow, plan_requests: Mapping[str, Request], assigned: Collection[str] = ()
) -> tuple[list[Pair], dict[str, str]]:
    """Finds the pairs that a plan requests, with the linears that it does not name and they need.

    Args:
        dataflow: The dataflow of the unit.
        plan_requests: The requests, by FQN inside the unit.
        assigned: Linears whose role another plan has fixed.

    Returns:
        Columns and their rows, and what is wrong with linears that fit no pair, by FQN.
    """
    order = list(dataflow.linears)
    free = [fqn for fqn in order if fqn not in assigned]

    def wanted(fqn: str) -> str | None:
        return plan_requests[fqn].wanted if fqn in plan_requests else None

    def entries(fqns: list[str]) -> str:
        words = [f"{fqn} ({plan_requests[fqn].entry})" if fqn in plan_requests else fqn for fqn in fqns]
        return ", ".join(words) or "no linear of its layer"

    problems: dict[str, str] = {}
    rows = [fqn for fqn in free if wanted(fqn) == "row"]
    for column in [fqn for fqn in free if wanted(fqn) == "column"]:
        readers = [fqn for fqn in order if column in dataflow.sources[fqn]]
        if not readers or any(r not in free or wanted(r) not in (None, "row") for r in readers):
            problems[column] = (
                f"is colwise, but its output is read by {entries(readers)}; make what reads it rowwise, or make it"
                " colwise_gather_output"
            )
        else:
            rows += [fqn for fqn in readers if fqn not in rows]
    groups: list[tuple[set[str], list[str]]] = []
    used: set[str] = set()
    for row in rows:  # grows
        columns = {c for c in dataflow.sources[row] if c in free and wanted(c) in (None, "column")} - {*rows, *problems}
        if not columns:
            problems[row] = (
                f"is rowwise, but no colwise linear feeds it: its input comes from"
                f" {entries(sorted(dataflow.sources[row], key=order.index))}; make what feeds it colwise, or make it"
                " colwise_gather_output or replicated"
            )
            continue
        # A linear that reads a sharded value must be a row too.
        used |= columns
        rows += [r for r in free if dataflow.sources[r] & columns and wanted(r) is None and r not in {*rows, *used}]
        joined = [group for group in groups if group[0] & columns]
        groups = [group for group in groups if group not in joined]
        groups.append(
            (columns.union(*(group[0] for group in joined)), [*(r for group in joined for r in group[1]), row])
        )
    pairs = [
        (tuple(sorted(columns, key=order.index)), tuple(sorted(together, key=order.index)))
        for columns, together in groups
    ]
    return sorted(pairs, key=lambda pair: order.index(pair[1][0])), problems


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
            f" {reason}; leave it out of the plan, or make it replicated"
        )
