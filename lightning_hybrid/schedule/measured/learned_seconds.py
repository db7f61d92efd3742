"""The seconds of a step's operations, from the measured seconds of stages under one cut or several.

One cut says how long each stage takes; what its operations take is their share by estimated cost. A second cut tells
more: a layer between two cuts is alone in the difference of two stages. Operations that are in one stage under each of
the cuts are one group:

    measured   | 0 1 2 3 | 4 5 6 7 |  and  | 0 1 2 3 4 | 5 6 7 |      groups   | 0 1 2 3 | 4 | 5 6 7 |

The seconds of groups are those that give all measured stages, found by proportional fitting (Darroch and Ratcliff
1972), which ends at the nearest values where noise lets nothing fit. Inside of a group, operations take what their cost
says at the usual rate of the step. What the group takes beyond that is shared among its elements evenly: which of them
is slow is not known, and its estimated cost does not say.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_hybrid.graph.partition import Assignment, node_cost
from lightning_hybrid.schedule.measured.propose_cuts import cut_points
from lightning_hybrid.schedule.measured.stage_seconds import StageSeconds, seconds_of_nodes

_ROUNDS = 300
_FLOOR = 1e-3  # of a mean group: what the estimates do not count may take long


@dataclass(frozen=True)
class MeasuredCut:
    """The measurement of one cut.

    Attributes:
        assignment: Of the step's nodes to stages.
        stages: Measured, by number.
        step_seconds: Of a step.
    """

    assignment: Assignment
    stages: Sequence[StageSeconds]
    step_seconds: float

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
