"""Cuts of least predicted time from measured seconds of stages, and the seconds of units."""

import itertools

import pytest

from lightning_hybrid.graph.partition import assign, owner_stages
from lightning_hybrid.graph.step_graph import Node, StepGraph, Value
from lightning_hybrid.schedule import Portals, Timeline, make_schedule, simulate
from lightning_hybrid.schedule.measured.cuts import CutProposal, CutSearch, cut_points, present_cuts
from lightning_hybrid.schedule.measured.seconds import (
    StageSeconds,
    describe_range,
    seconds_of_nodes,
    seconds_of_stages,
    seconds_of_units,
    unit_ranges,
)


def blocks(count, flops=None):
    """Blocks one after the other, then a loss; each block is one node of the given FLOPs."""
    flops = flops or [1e6] * count
    nodes = [
        Node(i, f"@blocks.{i}", (i - 1,) if i else (), (f"blocks.{i}.weight",), (i,), flops=flops[i])
        for i in range(count)
    ]
    nodes.append(Node(count, "mean", (count - 1,), (), (count,), flops=1.0))
    values = tuple(Value(i, (2, 2), "float32", (2, 1), requires_grad=True) for i in range(count + 1))
    return StepGraph("training_step", tuple(nodes), values, {f"blocks.{i}.weight": 4 for i in range(count)}, loss=count)


def assigned(graph, num_stages, cuts=None):
    return assign(graph, owner_stages(graph, num_stages, cuts), num_stages)


def proposed(assignment, totals, schedule):
    stages = [StageSeconds(stage, total / 3, 2 * total / 3) for stage, total in enumerate(totals)]
    search = CutSearch(assignment.graph, assignment.num_stages, schedule, seconds_of_nodes(assignment, stages))
    cuts, present = search.fastest_of_others(()), search.simulated(assignment)
    return CutProposal(search.names(cuts), present_cuts(assignment), present, search.seconds(cuts))


def test_a_slow_stage_gives_units_away():
    assignment = assigned(blocks(8), 2)
    schedule = make_schedule("1f1b", 2, 8)
    proposal = proposed(assignment, [4.0, 12.0], schedule)
    assert proposal.present == ("blocks.4",)
    assert proposal.cuts == ("blocks.5",)  # 7 and 9 seconds; then 10 and 6
    assert proposal.seconds == pytest.approx(8 * 12 + 4)
    assert proposal.proposed_seconds == pytest.approx(8 * 9 + 7)
    assert proposal.gain(110.0) == pytest.approx(21 / 110)


def test_balanced_stages_stay():
    schedule = make_schedule("1f1b", 2, 8)
    for graph, totals in ((blocks(8), [8.0, 8.0]), (blocks(2), [1.0, 9.0])):  # of the second nothing can be moved
        proposal = proposed(assigned(graph, 2), totals, schedule)
        assert proposal.cuts == proposal.present and proposal.gain(100.0) == 0


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zero_bubble"])
@pytest.mark.parametrize("totals", [(1.0, 6.0, 2.0), (5.0, 1.0, 1.0), (3.0, 2.0, 7.0)], ids=str)
def test_no_other_cuts_are_faster(name, totals):
    graph, schedule = blocks(9), make_schedule(name, 3, 6)
    assignment = assigned(graph, 3)
    proposal = proposed(assignment, totals, schedule)
    each = [totals[stage] / 3 for stage in assignment.node_stage[:9]]
    fastest = float("inf")
    for cut in itertools.combinations(range(1, 9), 2):
        sums = [sum(each[a:b]) for a, b in itertools.pairwise((0, *cut, 9))]
        costs = {"forward_seconds": [s / 3 for s in sums], "backward_seconds": [2 * s / 3 for s in sums]}
        other = assigned(graph, 3, [f"blocks.{i}" for i in cut])
        fastest = min(fastest, simulate(schedule, Portals.of(other), **costs).makespan_seconds)
    assert proposal.proposed_seconds == pytest.approx(fastest, rel=1e-4)


def test_stages_of_one_rank_are_moved_too():
    schedule = make_schedule("interleaved_1f1b", 2, 4, 2)
    proposal = proposed(assigned(blocks(12), 4), [1.0, 1.0, 9.0, 1.0], schedule)
    assert proposal.proposed_seconds < 0.8 * proposal.seconds
    assert len(proposal.cuts) == 3


def test_cuts_are_names_that_the_partition_takes():
    graph = blocks(6)
    points = cut_points(graph)
    assert points == [(i, f"blocks.{i}") for i in range(6)]
    for index, name in points[1:]:
        assert assigned(graph, 2, [name]).node_stage[index] == 1
        assert present_cuts(assigned(graph, 2, [name])) == (name,)


def test_seconds_of_stages_are_medians():
    timeline = simulate(
        make_schedule("zero_bubble", 2, 3),
        Portals(frozenset({(0, 1)}), frozenset({(0, 1)})),
        forward_seconds=[1.0, 2.0],
        backward_seconds=[4.0, 6.0],
    )
    slow = Timeline(tuple(s._replace(end=s.end + 9 * (s.action.microbatch == 0)) for s in timeline.spans), 2)
    first, second = seconds_of_stages([slow], 2)
    assert (first.forward, first.backward, first.weight) == pytest.approx((1.0, 4.0, 0.0))
    assert (second.forward, second.backward, second.weight) == pytest.approx((2.0, 3.0, 3.0))
    assert second.total == pytest.approx(8.0)


def test_units_share_the_seconds_of_their_stage_by_cost():
    assignment = assigned(blocks(4, [3e6, 1e6, 2e6, 2e6]), 2)
    units = seconds_of_units(assignment, [StageSeconds(0, 4.0, 8.0), StageSeconds(1, 1.0, 1.0, 3.0)])
    assert [unit.name for unit in units] == ["blocks.0", "blocks.1", "blocks.2", "blocks.3", ""]
    assert [unit.forward for unit in units] == pytest.approx([3.0, 1.0, 0.5, 0.5, 0.0], abs=1e-3)
    assert [unit.backward for unit in units] == pytest.approx([6.0, 2.0, 2.0, 2.0, 0.0], abs=1e-3)
    assert unit_ranges(assignment) == [("blocks.0", "blocks.1"), ("blocks.2", "blocks.3")]
    assert [describe_range(units) for units in (("a", "b"), ("a", "a"), ("", ""))] == [
        *("a to b", "a", "operations outside of layers")
    ]


def test_search_of_many_stages():
    """There are too many cuts to try all of them: single ones are moved."""
    graph, schedule = blocks(32), make_schedule("1f1b", 8, 32)
    proposal = proposed(assigned(graph, 8), [*[1.0] * 7, 4.0], schedule)
    assert proposal.proposed_seconds < 0.5 * proposal.seconds
