"""The widths of stages, chosen: PipeDream's partition of layers over ranks (Narayanan et al. 2019, section 3.1).

A stage of w ranks takes its microbatches in turn, so that each lasts its time divided by w. Of the divisions of the
elements into two stages or more, the best one's slowest stage is the bound. Among those within a tie of it the one with
the fewest copies of parameters wins: a rank for each stage, wherever that is as fast.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from lightning_hybrid.errors import PartitionError
from lightning_hybrid.graph.partition import (
    assign,
    balance,
    costs_between,
    cut_at,
    elements_of,
    owner_stages,
    owners_from,
)
from lightning_hybrid.graph.step_graph import Node, StepGraph

TIE = 0.03  # relative difference of the slowest stages that estimates do not resolve
_INFINITE = float("inf")


class Elements(NamedTuple):
    """What stages are made of, in the order in which they run."""

    costs: Sequence[float]  # the cost of each
    sizes: Sequence[float]  # bytes of parameters, which each further rank of its stage holds too
    narrow: Sequence[bool] = ()  # whether its stage has one rank alone; none is if empty

    @property
    def firsts(self) -> list[int]:
        """For each number of elements, the first element of the longest segment that ends there and may be wide."""
        flags = self.narrow or [False] * len(self.costs)
        return [0, *itertools.accumulate((n + 1 if is_narrow else 0 for n, is_narrow in enumerate(flags)), max)]


class Stages(NamedTuple):
    """Segments of elements with the ranks of each."""

    starts: list[int]  # the first element of each, from 0 on
    widths: list[int]  # the number of ranks of each

    @property
    def is_ordinary(self) -> bool:
        """Whether each stage has one rank."""
        return set(self.widths) <= {1}

    def slowest(self, costs: Sequence[float]) -> float:
        """The largest cost of a stage, divided by its width."""
        ends = [*self.starts[1:], len(costs)]
        return max(sum(costs[a:b]) / w for a, b, w in zip(self.starts, ends, self.widths, strict=True))


def choose_widths(elements: Elements, num_ranks: int) -> Stages | None:
    """The stages over all of these ranks that are fastest, or tied and with the fewest copies; None without any.

    In O(n * num_ranks ** 2).
    """
    costs = elements.costs
    bound = (1 + TIE) * _least_slowest(elements, num_ranks)
    if bound == _INFINITE:
        return None
    if num_ranks <= len(costs):
        ordinary = Stages(balance(costs, num_ranks), [1] * num_ranks)
        if ordinary.slowest(costs) <= bound:
            return ordinary
    return _fewest_copies(elements, num_ranks, bound)


def widths_of(elements: Elements, num_ranks: int) -> Stages | None:
    """The same where each element is a stage: every further rank goes to the slowest stage that may have it."""
    widths = [1] * len(elements.costs)
    wide = [n for n in range(len(widths)) if not (elements.narrow and elements.narrow[n])]
    for _ in range(num_ranks - len(widths)):
        if not wide:
            return None
        widths[max(wide, key=lambda n: elements.costs[n] / widths[n])] += 1
    return Stages(list(range(len(widths))), widths) if sum(widths) == num_ranks else None


def owners_and_widths(
    graph: StepGraph, num_ranks: int, cuts: Sequence[str] | None = None, narrow: Collection[str] = ()
) -> tuple[dict[str, int], tuple[int, ...]]:
    """The owner stage of each parameter, and the widths of the stages; these are empty where each has one rank.

    Args:
        graph: The recorded training step.
        num_ranks: Number of pipeline ranks, which all have a stage.
        cuts: FQNs at which the stages 1, 2, ... begin; chosen with the widths if None.
        narrow: FQNs of parameters and units whose stage has one rank. So has one on which the step writes.

    Raises:
        PartitionError: As for `owner_stages`, if no stage is wide.
    """
    starts, first_use = elements_of(graph)
    begins = [0, *starts[1:]] if cuts is None else cut_at(graph, len(cuts) + 1, cuts)
    costs, one_rank = costs_between(graph, begins), set(narrow)
    ends = [*begins[1:], len(graph.nodes)]
    spans = list(zip(begins, ends, strict=True))
    sizes = [sum(graph.parameter_bytes[name] for name, node in first_use.items() if a <= node < b) for a, b in spans]
    while True:
        flags = [any(_has_one_rank(node, one_rank) for node in graph.nodes[a:b]) for a, b in spans]
        found = (choose_widths if cuts is None else widths_of)(Elements(costs, sizes, flags), num_ranks)
        if found is None or found.is_ordinary:
            return owner_stages(graph, num_ranks, cuts, num_ranks), ()
        owners = owners_from(graph, [begins[start] for start in found.starts])
        too_wide = _too_wide(graph, owners, found.widths, one_rank)
        if not too_wide:
            return owners, tuple(found.widths)
        one_rank |= too_wide


def _has_one_rank(node: Node, narrow: Collection[str]) -> bool:
    return bool(node.written) or any(name in narrow for name in (node.unit, *node.parameters))


def _too_wide(graph: StepGraph, owners: dict[str, int], widths: Sequence[int], narrow: Collection[str]) -> set[str]:
    """The parameters of wide stages that also run what must have one rank, and began in another element."""
    try:
        assignment = assign(graph, owners, len(widths))
    except PartitionError:
        return set(owners)
    nodes = zip(graph.nodes, assignment.node_stage, strict=True)
    stages = {stage for node, stage in nodes if widths[stage] > 1 and _has_one_rank(node, narrow)}
    return {name for name, held in assignment.holders.items() if not stages.isdisjoint(held)}


def _ends(elements: Elements, num_ranks: int) -> Iterator[tuple[int, int, list[int]]]:
    """Numbers of ranks, the width of the last stage of so many, and the least first element of it by its end."""
    firsts = elements.firsts
    for ranks in range(1, num_ranks + 1):
        for width in range(1, min(ranks, max(1, num_ranks - 1)) + 1):
            yield ranks, width, firsts if width > 1 else [0] * len(firsts)


def _least_slowest(elements: Elements, num_ranks: int) -> float:
    count, sums = len(elements.costs), [0.0, *itertools.accumulate(elements.costs)]
    # best[r][n]: the least slowest stage of the first n elements on r ranks; it grows with n once it is finite.
    best = [[0.0] + [_INFINITE] * count] + [[_INFINITE] * (count + 1) for _ in range(num_ranks)]
    for ranks, width, firsts in _ends(elements, num_ranks):
        before, row, start = best[ranks - width], best[ranks], 0
        for end in range(1, count + 1):
            start = max(start, firsts[end])
            while start + 1 < end and before[start + 1] <= (sums[end] - sums[start + 1]) / width:
                start += 1
            while start + 1 < end and before[start] == _INFINITE:
                start += 1
            for first in (start, start + 1):  # the larger of both is least where they meet
                if firsts[end] <= first < end:
                    row[end] = min(row[end], max(before[first], (sums[end] - sums[first]) / width))
    return best[num_ranks][count]


def _fewest_copies(elements: Elements, num_ranks: int, bound: float) -> Stages:
    count, sums = len(elements.costs), [0.0, *itertools.accumulate(elements.costs)]
    # One byte more for each element: of stages without parameters narrow ones win too.
    held = [0.0, *itertools.accumulate(size + 1 for size in elements.sizes)]
    best = [[0.0] + [_INFINITE] * count] + [[_INFINITE] * (count + 1) for _ in range(num_ranks)]
    last = [[(0, 0)] * (count + 1) for _ in range(num_ranks + 1)]
    for ranks, width, firsts in _ends(elements, num_ranks):
        before, least, window = best[ranks - width], 0, deque[int]()  # firsts by growing sum of copies
        for end in range(1, count + 1):
            new = end - 1
            while window and before[window[-1]] - width * held[window[-1]] >= before[new] - width * held[new]:
                window.pop()
            window.append(new)
            least = max(least, firsts[end])
            while least < end and (sums[end] - sums[least]) / width > bound:
                least += 1
            while window and window[0] < least:
                window.popleft()
            if window and (copies := before[window[0]] + width * (held[end] - held[window[0]])) < best[ranks][end]:
                best[ranks][end], last[ranks][end] = copies, (window[0], width)
    starts, widths, end = list[int](), list[int](), count
    while end:
        end, width = last[num_ranks][end]
        starts.insert(0, end)
        widths.insert(0, width)
        num_ranks -= width
    return Stages(starts, widths)
