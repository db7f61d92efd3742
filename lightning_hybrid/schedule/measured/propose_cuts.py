"""Pipeline cuts of the least predicted time, from the measured seconds of the stages.

The seconds of a stage are shared among its operations by their estimated costs. All cuts are simulated where these are
few. Elsewhere the contiguous cuts with the least largest stage are the start, and single cuts are moved by one unit
while the simulated schedule becomes shorter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_hybrid.errors import PartitionError, ScheduleError
from lightning_hybrid.graph.partition import (
    Assignment,
    _elements,
    _updates,
    assign,
    balance,
    check_shared,
    owner_stages,
)
from lightning_hybrid.graph.step_graph import StepGraph
from lightning_hybrid.schedule.linked_stages_and_messages import Portals
from lightning_hybrid.schedule.measured.stage_seconds import StageSeconds, seconds_of_nodes
from lightning_hybrid.schedule.schedule_and_actions import Schedule
from lightning_hybrid.schedule.simulator import simulate

# Changes of the step that are not larger are within the noise of measurements.
NOISE = 0.03
# Actions and nodes of the step to go through in one search, about two seconds of Python.
_MOST_WORK = 300_000


@dataclass(frozen=True)
class CutProposal:
    """Cuts that are predicted to be faster than the present ones.

    Attributes:
        cuts: FQNs of the first unit of each stage but the first, as ``pipeline_cuts`` takes them.
        present: The same of the present stages.
        seconds: Of the schedule with the present stages, simulated.
        proposed_seconds: Of the schedule with the proposed ones, simulated.
    """

    cuts: tuple[str, ...]
    present: tuple[str, ...]
    seconds: float
    proposed_seconds: float

    def gain(self, step_seconds: float) -> float:
        """The share of a measured step that the cuts are predicted to save."""
        return (self.seconds - self.proposed_seconds) / step_seconds if step_seconds > 0 else 0.0

    def describe(self, step_seconds: float) -> str:
        """The cuts, and the predicted change of a measured step."""
        after = step_seconds - (self.seconds - self.proposed_seconds)
        return (
            f"pipeline_cuts={list(self.cuts)} is predicted to take {1000 * after:.1f} ms per step instead of"
            f" {1000 * step_seconds:.1f} ms ({-self.gain(step_seconds):+.1%})"
        )


def propose_cuts(assignment: Assignment, stages: Sequence[StageSeconds], schedule: Schedule) -> CutProposal | None:
    """Find the cuts of least predicted time.

    Args:
        assignment: The present stages of the recorded step.
        stages: Their measured seconds, by number.
        schedule: The order of the actions, which stays.

    Returns:
        The cuts; None if no others are predicted to be faster.
    """
    graph, num_stages = assignment.graph, assignment.num_stages
    points = cut_points(graph)
    if num_stages < 2 or len(points) < num_stages:
        return None
    nodes = seconds_of_nodes(assignment, stages)
    search = _Search(graph, num_stages, schedule, points, nodes)
    present = search.simulated(assignment)
    sums = [sum(map(sum, nodes[begin:end])) for begin, end in search.elements()]
    best = search.fastest(tuple(balance(sums, num_stages)[1:]))
    seconds = search.seconds(best)
    if not seconds < present:
        return None
    return CutProposal(search.names(best), present_cuts(assignment), present, seconds)


def cut_points(graph: StepGraph) -> list[tuple[int, str]]:
    """Return the nodes at which a stage may begin, and the name of each as a cut: its unit, or its first parameter."""
    starts, first_use = _elements(graph, _updates(graph))
    names: dict[int, str] = {}
    for parameter, index in first_use.items():
        names.setdefault(index, graph.nodes[index].unit or parameter)
    return [(index, names[index]) for index in starts]


def present_cuts(assignment: Assignment) -> tuple[str, ...]:
    """Return the name at which each stage but the first begins; empty for a stage that first uses no parameter."""
    names: dict[int, str] = {}
    for index, name in cut_points(assignment.graph):
        names.setdefault(assignment.node_stage[index], name)
    return tuple(names.get(stage, "") for stage in range(1, assignment.num_stages))


class _Search:
    """Predicts the seconds of cuts, each given by its numbers among the points where a stage may begin."""

    def __init__(
        self,
        graph: StepGraph,
        num_stages: int,
        schedule: Schedule,
        points: Sequence[tuple[int, str]],
        nodes: Sequence[tuple[float, float]],
    ) -> None:
        self._graph, self._num_stages, self._schedule = graph, num_stages, schedule
        self._points, self._nodes = points, nodes
        self._known: dict[tuple[int, ...], float] = {}

    def elements(self) -> Iterator[tuple[int, int]]:
        """The ranges of nodes between the points; the first one has all before it."""
        begins = [0, *(index for index, _ in self._points[1:])]
        return zip(begins, [*begins[1:], len(self._graph.nodes)], strict=True)

    def names(self, cuts: Sequence[int]) -> tuple[str, ...]:
        """The FQNs of cuts."""
        return tuple(self._points[cut][1] for cut in cuts)

    def fastest(self, first: tuple[int, ...]) -> tuple[int, ...]:
        """The cuts of least seconds: of all where these are few, else by moving one at a time from the first."""
        tries = 1 + _MOST_WORK // (sum(map(len, self._schedule.actions)) + len(self._graph.nodes))
        places = range(1, len(self._points))
        if math.comb(len(places), len(first)) <= tries:
            return min([first, *itertools.combinations(places, len(first))], key=self.seconds)
        best = first
        while tries > 0:
            moves = list(self.neighbours(best))[:tries]
            tries -= len(moves)
            following = min([best, *moves], key=self.seconds)
            if following == best:
                break
            best = following
        return best

    def neighbours(self, cuts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """The cuts of which one is moved by one point."""
        for position, cut in enumerate(cuts):
            for moved in (cut - 1, cut + 1):
                others = (*cuts[:position], moved, *cuts[position + 1 :])
                if all(a < b for a, b in zip((0, *others), (*others, len(self._points)), strict=True)):
                    yield others

    def seconds(self, cuts: tuple[int, ...]) -> float:
        """The simulated seconds of the schedule; infinite for cuts that the step cannot have."""
        if cuts not in self._known:
            try:
                owners = owner_stages(self._graph, self._num_stages, self.names(cuts))
                assignment = assign(self._graph, owners, self._num_stages)
                check_shared(assignment)
                self._known[cuts] = self.simulated(assignment)
            except (PartitionError, ScheduleError):
                self._known[cuts] = float("inf")
        return self._known[cuts]

    def simulated(self, assignment: Assignment) -> float:
        """The simulated seconds of the schedule with the stages of an assignment."""
        forward, backward = [0.0] * self._num_stages, [0.0] * self._num_stages
        for stage, seconds in zip(assignment.node_stage, self._nodes, strict=True):
            forward[stage] += seconds[0]
            backward[stage] += seconds[1]
        portals = Portals.of(assignment)
        return simulate(self._schedule, portals, forward_seconds=forward, backward_seconds=backward).makespan_seconds
