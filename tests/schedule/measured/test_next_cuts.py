"""Which cuts come next in a run that measures its stages: on given seconds of layers, without a run."""

import itertools
import random

import pytest
from schedule.measured.test_cuts import assigned, blocks

from lightning_hybrid.schedule import Portals, make_schedule, simulate
from lightning_hybrid.schedule.measured.cuts import MeasuredCut, learned_seconds, next_cuts
from lightning_hybrid.schedule.measured.seconds import StageSeconds


def measured(graph, seconds, num_stages, cuts, schedule, noise=0.0):
    """What a run would measure, if each layer takes some seconds, a third of them in its forward."""
    assignment = assigned(graph, num_stages, cuts)
    totals = [0.0] * num_stages
    for stage, value in zip(assignment.node_stage, [*seconds, 0.0], strict=True):
        totals[stage] += value * random.uniform(1 - noise, 1 + noise)
    stages = [StageSeconds(stage, total / 3, total / 3, total / 3) for stage, total in enumerate(totals)]
    costs = {"forward_seconds": [t / 3 for t in totals], "backward_seconds": [2 * t / 3 for t in totals]}
    return MeasuredCut(assignment, stages, simulate(schedule, Portals.of(assignment), **costs).makespan_seconds)


def moves(seconds, flops=None, num_stages=2, noise=0.0):
    """The steps under the cuts of a run, and the shortest step of all cuts."""
    graph, schedule = blocks(len(seconds), flops), make_schedule("1f1b", num_stages, 4)
    cuts = [measured(graph, seconds, num_stages, None, schedule, noise)]
    while (found := next_cuts(cuts, schedule)) is not None:
        assert len(cuts) < 9, "the moves do not end"
        cuts.append(measured(graph, seconds, num_stages, list(found.cuts), schedule, noise))
    each = itertools.combinations([f"blocks.{i}" for i in range(1, len(seconds))], num_stages - 1)
    best = min(measured(graph, seconds, num_stages, list(names), schedule).step_seconds for names in each)
    return [cut.step_seconds for cut in cuts], best


@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("slow", range(8))
def test_one_slow_layer_that_costs_nothing_by_count(slow, num_stages):
    """The run ends at its best cut within three moves."""
    steps, best = moves([0.060 if layer == slow else 0.003 for layer in range(8)], num_stages=num_stages)
    assert steps[-1] == pytest.approx(best) and len(steps) <= 4, steps


@pytest.mark.parametrize("layers", [4, 6, 8, 12, 16])
@pytest.mark.parametrize("counted", [None, 0.0, 5e6])
def test_at_most_three_moves(layers, counted):
    """Whatever the slow layer costs by count, and wherever it is, to a good cut, and never one that failed."""
    for slow in range(layers):
        flops = None if counted is None else [counted if layer == slow else 1e6 for layer in range(layers)]
        steps, best = moves([0.060 if layer == slow else 0.003 for layer in range(layers)], flops)
        assert len(steps) <= 4 and steps[-1] == min(steps) <= 1.08 * best, (slow, steps)


@pytest.mark.parametrize("seed", range(30))
def test_the_step_is_never_longer_than_before_the_first_move(seed):
    """Also where estimated costs say nothing, and measurements are noisy: moves end, and failed ones are taken back."""
    random.seed(seed)
    seconds = [random.choice([0.001, 0.003, 0.01, 0.04]) for _ in range(8)]
    flops = [random.choice([0.0, 1e6, 2e6]) for _ in range(8)]
    steps, _ = moves(seconds, flops, noise=0.005)
    assert steps[-1] <= 1.02 * min(steps[0], 1.03 * min(steps)), steps


def test_two_cuts_tell_a_layer_between_them():
    graph, schedule, seconds = blocks(6), make_schedule("1f1b", 2, 4), [3.0, 3.0, 3.0, 60.0, 3.0, 3.0]
    cuts = [measured(graph, seconds, 2, [f"blocks.{cut}"], schedule) for cut in (3, 4)]
    found = [sum(each) for each in learned_seconds(cuts)]
    assert found[:6] == pytest.approx(seconds, rel=1e-3)


def test_a_move_that_fails_is_taken_back():
    graph, schedule = blocks(8), make_schedule("1f1b", 2, 4)
    first, second = (measured(graph, [1.0] * 8, 2, [f"blocks.{cut}"], schedule) for cut in (4, 6))
    back = next_cuts([first, second], schedule)
    assert back.cuts == ("blocks.4",) and back.proposed_seconds == first.step_seconds
    assert next_cuts([first, second, first], schedule) is None
