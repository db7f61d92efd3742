"""The pairs of column- and row-parallel linears that a plan requests."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from lightning_hybrid.tensor.discovery.linear_dataflow import LinearDataflow, Pair
from lightning_hybrid.tensor.requests.user_plan import Request


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
