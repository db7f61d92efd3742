"""A check that a trace uses each parameter on a stage that owns it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lightning_hybrid.errors import WITHOUT_STAGES, StepError
from lightning_hybrid.graph.partition import Assignment
from lightning_hybrid.graph.step_graph import Node


def check_parameter_owners(
    assignment: Assignment,
    owner_stages: Mapping[str, int],
    rank_of: Callable[[int], int],
    ranks_of: Callable[[str], tuple[int, ...]],
) -> None:
    """Refuse a step that reads a parameter on ranks that do not own it.

    Args:
        assignment: Assignment of a step that was recorded after the first one.
        owner_stages: Owner stage of each parameter, as the first step decided.
        rank_of: Returns the rank of a stage.
        ranks_of: Returns the owner ranks of a parameter.

    Raises:
        StepError: The step reads such a parameter; names it, and the parameter or buffer before it.
    """
    graph = assignment.graph
    for node, stage in zip(graph.nodes, assignment.node_stage, strict=True):
        for name in node.parameters:
            if name in assignment.sinks or rank_of(stage) in ranks_of(name):
                continue
            earlier = _colocated_source(assignment, owner_stages, node)
            if earlier is None:
                place, other = f"on stage {stage}", ""
            else:
                written = ", where that step writes it" if earlier in graph.buffers else ""
                place, other = f"after {earlier!r}", f" and {earlier!r} on stage {stage}{written}"
            raise StepError(
                f"{node.line or graph.step}: {graph.step} uses {name!r} {place}, but the first training step put it on"
                f" pipeline ranks {list(ranks_of(name))}{other}; use both in the same order in every step and batch,"
                f" or {WITHOUT_STAGES}",
                entry="parameter-order",
            )


def _colocated_source(assignment: Assignment, owner_stages: Mapping[str, int], node: Node) -> str | None:
    """A parameter or buffer on the stage of a node, from which an input of the node was computed there."""
    graph, stage = assignment.graph, assignment.node_stage[node.index]
    maker = {value: other for other in reversed(graph.nodes) for value in other.outputs}
    visited, waiting = {node.index}, [node]
    while waiting:
        current = waiting.pop()
        for name in current.parameters:
            if owner_stages.get(name) == stage:
                return name
        for value in (*current.inputs, *current.reads):
            before = maker.get(value)
            if before is not None and before.index not in visited and assignment.node_stage[before.index] == stage:
                visited.add(before.index)
                waiting.append(before)
    return None
