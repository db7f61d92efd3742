"""Pipeline cuts of the least predicted time, from the measured seconds of the stages.

The seconds of a stage are shared among its operations by their estimated costs. All cuts are simulated where these are
few. Elsewhere the contiguous cuts with the least largest stage are the start, and single cuts are moved by one unit
while the simulated schedule becomes shorter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Hashable, Iterator, Sequence
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
_TELLING = 0.15  # of what the fastest cuts promise: more telling ones may promise so much less
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
    search = CutSearch(graph, num_stages, schedule, seconds_of_nodes(assignment, stages))
    present = search.simulated(assignment)
    found = search.fastest_of_others(())
    if found is None or not found[1] < present:
        return None
    return CutProposal(found[0], present_cuts(assignment), present, found[1])


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


class CutSearch:
    """Predicts the seconds of cuts, each given by its numbers among the points where a stage may begin."""

    def __init__(
        self,
        graph: StepGraph,
        num_stages: int,
        schedule: Schedule,
        nodes: Sequence[tuple[float, float]],
    ) -> None:
        """Take the seconds of the forward and of the backward of each node."""
        self._graph, self._num_stages, self._schedule = graph, num_stages, schedule
        self._points, self._nodes = cut_points(graph), nodes
        self._known: dict[tuple[int, ...], float] = {}

    def fastest_of_others(self, known: Collection[tuple[str, ...]]) -> tuple[tuple[str, ...], float] | None:
        """The cuts of least seconds, and these, without some that are given by name; None if there are no others."""
        found = self._fastest_of_others(known)
        return None if found is None else (self.names(found), self.seconds(found))

    def most_telling(
        self, known: Collection[tuple[str, ...]], group_of: Sequence[Hashable], limit: float
    ) -> tuple[tuple[str, ...], float] | None:
        """Of cuts near the fastest those that divide the longest group best, and their seconds; or None.

        Args:
            known: Cuts by name that are left out.
            group_of: Of each node; what the nodes of one group take is not told apart by what was measured so far.
            limit: In seconds; others are no gain.
        """
        fastest = self._fastest_of_others(known)
        if fastest is None or self.seconds(fastest) >= limit:
            return None
        limit = self.seconds(fastest) + _TELLING * (limit - self.seconds(fastest))
        near = [cuts for cuts, seconds in self._known.items() if seconds < limit]
        best = min(near, key=lambda cuts: (self._longest_group(cuts, group_of), self.seconds(cuts)))
        return self.names(best), self.seconds(best)

    def _longest_group(self, cuts: tuple[int, ...], group_of: Sequence[Hashable]) -> float:
        sums: dict[Hashable, float] = {}
        for stage, group, seconds in zip(self._assigned(cuts).node_stage, group_of, self._nodes, strict=True):
            sums[group, stage] = sums.get((group, stage), 0.0) + sum(seconds)
        return max(sums.values())

    def _fastest_of_others(self, known: Collection[tuple[str, ...]]) -> tuple[int, ...] | None:
        points = {name: number for number, (_, name) in reversed(list(enumerate(self._points)))}
        for names in known:
            if all(name in points for name in names):
                self._known[tuple(points[name] for name in names)] = float("inf")
        sums = [sum(map(sum, self._nodes[begin:end])) for begin, end in self.elements()]
        best = self.fastest(tuple(balance(sums, self._num_stages)[1:]))
        return None if math.isinf(self.seconds(best)) else best

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
                assignment = self._assigned(cuts)
                check_shared(assignment)
                self._known[cuts] = self.simulated(assignment)
            except (PartitionError, ScheduleError):
                self._known[cuts] = float("inf")
        return self._known[cuts]

    def _assigned(self, cuts: tuple[int, ...]) -> Assignment:
        owners = owner_stages(self._graph, self._num_stages, self.names(cuts))
        return assign(self._graph, owners, self._num_stages)

    def simulated(self, assignment: Assignment) -> float:
        """The simulated seconds of the schedule with the stages of an assignment."""
        forward, backward = [0.0] * self._num_stages, [0.0] * self._num_stages
        for stage, seconds in zip(assignment.node_stage, self._nodes, strict=True):
            forward[stage] += seconds[0]
            backward[stage] += seconds[1]
        portals = Portals.of(assignment)
        return simulate(self._schedule, portals, forward_seconds=forward, backward_seconds=backward).makespan_seconds
