"""Precedence of tensor plans: the user's, then the one that the model brings along, then the search's.

A plan fixes the role of linears. Which belong together is seen from a run, and how their features are arranged is found
by trying, for each authority alike; all is proved. What the user asks for is done or refused; what the model's plan
asks for is dropped, with a line in the table, where it cannot be proved.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from lightning_hybrid.tensor.discovery.linear_dataflow import Discovery, Pair
from lightning_hybrid.tensor.plan.unit_plan import UnitPlan
from lightning_hybrid.tensor.requests.user_plan import TensorPlanError, Wish

Origin = Literal["your plan", "the model's own plan", "found"]


@dataclass(frozen=True)
class Wishes:
    """What plans ask for the modules of one unit.

    Attributes:
        unit: FQN of the unit in the root.
        yours: By the user, by FQN inside the unit.
        own: By the model's own plan; nothing that the user's plan names.
    """

    unit: str = ""
    yours: Mapping[str, Wish] = field(default_factory=dict)
    own: Mapping[str, Wish] = field(default_factory=dict)

    @property
    def key(self) -> Hashable:
        """Equal for units of which the same is asked."""
        return tuple(tuple((fqn, wish.wanted) for fqn, wish in asked.items()) for asked in (self.yours, self.own))

    def named(self, fqn: str) -> str:
        """The FQN in the root of a module of the unit."""
        return ".".join(part for part in (self.unit, fqn) if part)

    def whole(self, unit: nn.Module) -> dict[str, str]:
        """Parameters that the user wants whole, each with the reason, by FQN inside the unit."""
        return {
            f"{fqn}.{name}" if fqn else name: f"your plan has {wish.said}"
            for fqn, wish in self.yours.items()
            if wish.wanted == "whole"
            for name, _ in unit.get_submodule(fqn).named_parameters(recurse=False)
        }


def wishes_by_unit(
    root: nn.Module, units: Mapping[str, nn.Module], yours: Mapping[str, Wish], own: Mapping[str, Wish]
) -> dict[str, Wishes]:
    """What is asked for each unit.

    Args:
        root: The user's module.
        units: Its tensor units, by FQN.
        yours: The user's wishes, by FQN in the root.
        own: Those of the model's own plan.

    Raises:
        TensorPlanError: The user wants to cut what lies in no unit.
    """
    places = {id(module): (fqn, inside) for fqn, unit in units.items() for inside, module in unit.named_modules()}
    modules = dict(root.named_modules(remove_duplicate=False))
    asked: dict[str, tuple[dict[str, Wish], dict[str, Wish]]] = {fqn: ({}, {}) for fqn in units}
    for fqn, wish in yours.items():
        unit, inside = places.get(id(modules[fqn]), (None, ""))
        if unit is not None:
            asked[unit][0][inside] = wish
        elif wish.wanted != "whole":
            raise TensorPlanError(
                f"tensor_parallel_plan has {wish.said}, which names {fqn}; the step does not call it inside of a layer,"
                " so it stays whole; leave it out of the plan"
            )
    for fqn, wish in own.items():
        unit, inside = places.get(id(modules[fqn]), (None, ""))
        if unit is not None and inside not in asked[unit][0]:
            asked[unit][1][inside] = wish
    return {fqn: Wishes(fqn, *both) for fqn, both in asked.items()}


def wished_pairs(
    found: Discovery, wishes: Mapping[str, Wish], taken: Collection[str] = ()
) -> tuple[list[Pair], dict[str, str]]:
    """The pairs that a plan asks for, with what it does not name and they need.

    Args:
        found: What a run showed.
        wishes: By FQN inside the unit.
        taken: Linears whose role another plan has fixed.

    Returns:
        Columns and their rows, and what is wrong with linears that fit no pair, by FQN.
    """
    order = list(found.linears)
    free = [fqn for fqn in order if fqn not in taken]

    def wanted(fqn: str) -> str | None:
        return wishes[fqn].wanted if fqn in wishes else None

    def said(fqns: list[str]) -> str:
        words = [f"{fqn} ({wishes[fqn].said})" if fqn in wishes else fqn for fqn in fqns]
        return ", ".join(words) or "no linear of its layer"

    problems: dict[str, str] = {}
    rows = [fqn for fqn in free if wanted(fqn) == "row"]
    for column in [fqn for fqn in free if wanted(fqn) == "column"]:
        readers = [fqn for fqn in order if column in found.sources[fqn]]
        if not readers or any(r not in free or wanted(r) not in (None, "row") for r in readers):
            problems[column] = (
                f"is colwise, but its output is read by {said(readers)}; make what reads it rowwise, or make it"
                " colwise_gather_output"
            )
        else:
            rows += [fqn for fqn in readers if fqn not in rows]
    groups: list[tuple[set[str], list[str]]] = []
    used: set[str] = set()
    for row in rows:  # grows
        columns = {c for c in found.sources[row] if c in free and wanted(c) in (None, "column")} - {*rows, *problems}
        if not columns:
            problems[row] = (
                f"is rowwise, but no colwise linear feeds it: its input comes from"
                f" {said(sorted(found.sources[row], key=order.index))}; make what feeds it colwise, or make it"
                " colwise_gather_output or replicated"
            )
            continue
        # What reads a cut value must be a row too.
        used |= columns
        rows += [r for r in free if found.sources[r] & columns and wanted(r) is None and r not in {*rows, *used}]
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


def check_done(wishes: Wishes, plan: UnitPlan) -> None:
    """See that the user's plan is followed.

    Args:
        wishes: What is asked.
        plan: What was planned.

    Raises:
        TensorPlanError: A linear has another role.
    """
    for fqn, wish in wishes.yours.items():
        if wish.wanted == "whole" or plan.roles.get(fqn) == wish.wanted:
            continue
        prefix = f"{fqn}." if fqn else ""
        reason = next((why for name, why in plan.kept.items() if name.startswith(prefix)), "its region was not proved")
        if any(fqn.startswith(f"{other}.") for other, role in plan.roles.items() if role == "attention"):
            reason = "it belongs to an nn.MultiheadAttention, which is cut by heads as one"
        elif reason == "no weight of a linear":
            reason = "it did not run, or did not multiply its input by its weight"
        raise TensorPlanError(
            f"tensor_parallel_plan has {wish.said}, but {wishes.named(fqn)} cannot be cut like that: {reason}; leave it"
            " out of the plan, or make it replicated"
        )
