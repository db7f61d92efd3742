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
    node_cost,
    owner_stages,
)
from lightning_hybrid.graph.step_graph import StepGraph
from lightning_hybrid.schedule.actions import Portals, Schedule
from lightning_hybrid.schedule.measured.seconds import StageSeconds, seconds_of_nodes
from lightning_hybrid.schedule.simulator import simulate

# Changes of the step that are not larger are within the noise of measurements.
NOISE = 0.03
_TELLING = 0.15  # of what the fastest cuts promise: more telling ones may promise so much less
# Actions and nodes of the step to go through in one search, about two seconds of Python.
_MOST_WORK = 300_000


@dataclass(frozen=True)
class CutProposal:
    """Cuts that are predicted to be faster than the present ones."""

    cuts: tuple[str, ...]  # FQNs of the first unit of each stage but the first, as ``pipeline_cuts`` takes them
    present: tuple[str, ...]  # the same of the present stages
    seconds: float  # of the schedule with the present stages, simulated
    proposed_seconds: float  # of the schedule with the proposed ones, simulated

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

    def most_telling(
        self, known: Collection[tuple[str, ...]], group_of: Sequence[Hashable], limit: float
    ) -> tuple[tuple[str, ...], float] | None:
        """The cuts near the fastest that divide the longest group best, and their seconds; or None.

        Args:
            known: Cuts by name that are left out.
            group_of: Of each node; what the nodes of one group take is not told apart by what was measured so far.
            limit: In seconds; others are no gain.
        """
        fastest = self.fastest_of_others(known)
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

    def fastest_of_others(self, known: Collection[tuple[str, ...]]) -> tuple[int, ...] | None:
        """The cuts of least seconds without some that are given by name; None if there are no others."""
        points = {name: number for number, (_, name) in reversed(list(enumerate(self._points)))}
        for names in known:
            if all(name in points for name in names):
                self._known[tuple(points[name] for name in names)] = float("inf")
        sums = [sum(map(sum, self._nodes[begin:end])) for begin, end in self.elements()]
        best = self.fastest(tuple(balance(sums, self._num_stages, self._schedule.widths)[1:]))
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
        """The cuts with one of them moved by one point."""
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


_ROUNDS = 300
_FLOOR = 1e-3  # of a mean group: what the estimates do not count may take long


@dataclass(frozen=True)
class MeasuredCut:
    """The measurement of one cut."""

    assignment: Assignment  # of the step's nodes to stages
    stages: Sequence[StageSeconds]  # measured, by number
    step_seconds: float  # of a step

    def is_of_same_step(self, other: MeasuredCut) -> bool:
        """Whether the nodes of both recordings are the same."""
        nodes, others = self.assignment.graph.nodes, other.assignment.graph.nodes
        same = len(nodes) == len(others) and all(a.name == b.name for a, b in zip(nodes, others, strict=True))
        return same and len(self.stages) == len(other.stages)


def learned_seconds(cuts: Sequence[MeasuredCut]) -> list[tuple[float, float]]:
    """Return the seconds of the forward and of the backward of each node, by all measured cuts, the latest one last."""
    latest = cuts[-1]
    if len(cuts) == 1:
        return seconds_of_nodes(latest.assignment, latest.stages)
    forward = _of_nodes(cuts, [[stage.forward for stage in cut.stages] for cut in cuts])
    backward = _of_nodes(cuts, [[stage.backward + stage.weight for stage in cut.stages] for cut in cuts])
    return list(zip(forward, backward, strict=True))


def _of_nodes(cuts: Sequence[MeasuredCut], measured: Sequence[Sequence[float]]) -> list[float]:
    graph = cuts[-1].assignment.graph
    group_of = list(zip(*(cut.assignment.node_stage for cut in cuts), strict=True))
    costs = [node_cost(node, graph) for node in graph.nodes]
    group_costs = dict.fromkeys(group_of, 0.0)
    for group, cost in zip(group_of, costs, strict=True):
        group_costs[group] += cost
    seconds = _of_groups(group_costs, measured)
    rate = _usual_rate(group_costs, seconds)
    expected = {group: min(seconds[group], rate * cost) for group, cost in group_costs.items()}
    elements = _element_of_nodes(cuts[-1].assignment)
    members = list(zip(group_of, elements, strict=True))
    of_element = dict.fromkeys(members, 0.0)
    nodes_of_element = dict.fromkeys(members, 0)
    for member, cost in zip(members, costs, strict=True):
        of_element[member] += cost
        nodes_of_element[member] += 1
    num_elements = {group: sum(each[0] == group for each in of_element) for group in group_costs}
    result = []
    for (group, element), cost in zip(members, costs, strict=True):
        total = of_element[group, element]
        share = cost / total if total else 1.0 / nodes_of_element[group, element]
        by_cost = expected[group] * cost / group_costs[group] if group_costs[group] else 0.0
        result.append(by_cost + share * (seconds[group] - expected[group]) / num_elements[group])
    return result


def _of_groups(
    costs: dict[tuple[int, ...], float], measured: Sequence[Sequence[float]]
) -> dict[tuple[int, ...], float]:
    """The seconds of groups, each given by its stage under each cut, that give the measured stages."""
    total = sum(map(sum, measured)) / len(measured)
    whole, mean = sum(costs.values()), total / len(costs)
    seconds = {group: (total * cost / whole if whole else 0.0) + _FLOOR * mean for group, cost in costs.items()}
    for _ in range(_ROUNDS):
        sums = [[0.0] * len(stages) for stages in measured]
        for group, value in seconds.items():
            for number, stage in enumerate(group):
                sums[number][stage] += value
        for group in seconds:
            for number, stage in enumerate(group):
                if sums[number][stage] > 0:
                    seconds[group] *= (measured[number][stage] / sums[number][stage]) ** (1.0 / len(measured))
    return seconds


def _usual_rate(costs: dict[tuple[int, ...], float], seconds: dict[tuple[int, ...], float]) -> float:
    """Seconds per cost of the groups with the lower half of it: some groups have a slow layer, most have none."""
    rates = sorted((seconds[group] / cost, cost) for group, cost in costs.items() if cost > 0)
    left = sum(cost for _, cost in rates) / 2
    for rate, cost in rates:
        left -= cost
        if left <= 0:
            return rate
    return 0.0


def _element_of_nodes(assignment: Assignment) -> list[int]:
    """The number of the element of each node: what lies between two points where a stage may begin."""
    begins = {index for index, _ in cut_points(assignment.graph)[1:]}
    return list(itertools.accumulate(int(index in begins) for index in range(len(assignment.graph.nodes))))


_MOST_MOVES = 3


def next_cuts(measured: Sequence[MeasuredCut], schedule: Schedule) -> CutProposal | None:
    """Return the cuts that come next; None if the present ones stay.

    Args:
        measured: Cuts of one step in the order in which the run had them, the present one last.
        schedule: The order of the actions, which stays.
    """
    present = measured[-1]
    graph, num_stages = present.assignment.graph, present.assignment.num_stages
    if num_stages < 2 or len(cut_points(graph)) < num_stages:
        return None
    best = min(measured, key=lambda cut: cut.step_seconds)
    search = CutSearch(graph, num_stages, schedule, learned_seconds(measured))
    known = {present_cuts(cut.assignment) for cut in measured}
    if present_cuts(present.assignment) in {present_cuts(cut.assignment) for cut in measured[:-1]}:
        return None  # taken back
    if len(measured) < _MOST_MOVES:
        groups = list(zip(*(cut.assignment.node_stage for cut in measured), strict=True))
        # Both are simulated: what a simulation leaves out is in both.
        before = search.simulated(best.assignment)
        found = search.most_telling(known, groups, before - NOISE * best.step_seconds)
        if found is not None:
            return _proposal(found[0], present, best.step_seconds - before + found[1])
    if present.step_seconds > min(measured[0].step_seconds, (1 + NOISE) * best.step_seconds):
        return _proposal(present_cuts(best.assignment), present, best.step_seconds)
    return None


def _proposal(cuts: tuple[str, ...], present: MeasuredCut, seconds: float) -> CutProposal:
    return CutProposal(cuts, present_cuts(present.assignment), present.step_seconds, seconds)
