"""A check that a trace uses each parameter on a stage that can hold it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lightning_hybrid.graph.partition import Assignment
from lightning_hybrid.graph.step_graph import Node
from lightning_hybrid.step.tracing.recording import StepError


def refuse_misplaced(
    assignment: Assignment, homes: Mapping[str, int], num_ranks: int, ranks_of: Callable[[str], tuple[int, ...]]
) -> None:
    """Refuse a step that reads a parameter on ranks that do not hold it.

    Args:
        assignment: Of a step that was recorded after the first one.
        homes: Stage of each parameter, as the first step put it.
        num_ranks: Ranks of the pipeline.
        ranks_of: Ranks that hold a parameter.

    Raises:
        StepError: It does; says which, and after what.
    """
    graph = assignment.graph
    for node, stage in zip(graph.nodes, assignment.node_stage, strict=True):
        for name in node.parameters:
            if name in assignment.sinks or stage % num_ranks in ranks_of(name):
                continue
            earlier = _brought_by(assignment, homes, node)
            if earlier is None:
                found, other = f"on stage {stage}", ""
            else:
                written = ", where that step writes it" if earlier in graph.buffers else ""
                found, other = f"after {earlier!r}", f" and {earlier!r} on stage {stage}{written}"
            raise StepError(
                f"{node.line or graph.step}: {graph.step} uses {name!r} {found}, but the first training step put it on"
                f" pipeline ranks {list(ranks_of(name))}{other}; use both in the same order in every step and batch,"
                " or set pipeline_parallel_size=1"
            )


def _brought_by(assignment: Assignment, homes: Mapping[str, int], node: Node) -> str | None:
    """A parameter or buffer that lies on the stage of a node, and went into what the node reads."""
    graph, stage = assignment.graph, assignment.node_stage[node.index]
    maker = {value: other for other in reversed(graph.nodes) for value in other.outputs}
    looked, waiting = {node.index}, [node]
    while waiting:
        current = waiting.pop()
        for name in current.parameters:
            if homes.get(name) == stage:
                return name
        for value in (*current.inputs, *current.reads):
            before = maker.get(value)
            if before is not None and before.index not in looked and assignment.node_stage[before.index] == stage:
                looked.add(before.index)
                waiting.append(before)
    return None
