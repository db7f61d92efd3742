"""A stage plan makes the schedules of its steps: in its placement, for the costs of its stages."""

from functools import partial

from harness.one_process_pipeline import OneRank, keyed
from lightning_hybrid.pipeline.stages.plan import StagePlan
from lightning_hybrid.pipeline.stages.recording import record_variant
from lightning_hybrid.schedule import StageCosts, chain, make_schedule, simulate
from lightning_hybrid.schedule.in_flight import most_in_flight
from models.cases import batch_of, make
from models.hand_written import Layers


class FourRanks:
    """A process group of four, seen by the second."""

    def size(self):
        return 4

    def rank(self):
        return 1


def test_stages_in_v_placement():
    plan = StagePlan(make(Layers), FourRanks(), keyed(), schedule="dualpipe_v", stages_per_rank=2)
    assert plan.stages == (1, 6) and [plan.rank_of(stage, 0) for stage in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert plan.training_schedule(9) == make_schedule("dualpipe_v", 4, 9)
    assert [plan.evaluation_schedule(3).rank_of(stage, 0) for stage in (0, 7)] == [0, 0]


def test_costs_of_stages_are_searched_for():
    module = make(Layers)
    plan = StagePlan(module, OneRank(), keyed(), stages_per_rank=2)
    step = partial(module.loss, batch_of(module.kind, range(2)))
    record_variant(plan, plan.recipe("training_step", step, trains=True))
    assert plan.stage_costs == plan.first.assignment.costs() and min(plan.stage_costs) > 0


def test_searched_schedule_depends_on_costs_and_limit():
    plan = StagePlan(make(Layers), FourRanks(), keyed(), schedule="zero_bubble_searched", max_microbatches_in_flight=6)
    equal = plan.training_schedule(12)
    plan.stage_costs = [5.0, 7.0, 4.0, 6.0]
    costs = StageCosts((5.0, 7.0, 4.0, 6.0), (10.0, 14.0, 8.0, 12.0))
    schedule = plan.training_schedule(12)
    assert schedule == make_schedule("zero_bubble_searched", 4, 12, max_in_flight=6, costs=costs) != equal
    assert 4 < max(most_in_flight(schedule)) <= 6
    seconds = {"forward_seconds": costs.forward, "backward_seconds": costs.backward}
    found, other = (simulate(each, chain(4), **seconds).makespan_seconds for each in (schedule, equal))
    assert found < other
