"""The predicted wait of the slowest rank against the simulation of the schedule's own program."""

import dataclasses
import itertools

import pytest

from lightning_hybrid.planner.costs.transformer_costs import TransformerShape, transformer_costs
from lightning_hybrid.planner.hardware.hardware import load_hardware
from lightning_hybrid.planner.plan_layout import FORMATS, PlanLayout
from lightning_hybrid.planner.time.bubble_share import StageShares, bubble_share
from lightning_hybrid.planner.time.predict_time import predict_time
from lightning_hybrid.schedule import Kind, chain, make_schedule
from lightning_hybrid.schedule.simulator import replay

STAGES = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("eager_1f1b", 1),
    ("interleaved_1f1b", 2),
    ("zero_bubble", 1),
    ("zero_bubble_v", 2),
    ("dualpipe_v", 2),
    ("zero_bubble_searched", 1),
    ("zero_bubble_searched", 2),
]
SPLITS = [(1 / 3, 1 / 3), (0.25, 0.25), (0.28, 0.2), (0.35, 0.0)]  # forward, gradients of weights; all make 1
SIZES = [(2, 3), (4, 3), (4, 4), (4, 16), (8, 12), (12, 30)]


def simulated(schedule, forward, weights, ends=(1.0, 1.0)):
    """Seconds of a step, and of one microbatch on each rank."""
    seconds = {Kind.F: forward, Kind.I: 1 - forward - weights, Kind.W: weights, Kind.B: 1 - forward}
    stages = [ends[0], *[1.0] * (schedule.num_stages - 2), ends[1]]
    of_actions = {a: seconds.get(a.kind, 0.0) * stages[a.stage] for row in schedule.actions for a in row}
    step = replay(schedule, chain(schedule.num_stages), of_actions).makespan_seconds
    ranks = range(schedule.num_ranks)
    return step, [sum(stages[s] for s in range(len(stages)) if schedule.rank_of(s) == rank) for rank in ranks]


@pytest.mark.parametrize(("name", "stages"), STAGES)
def test_a_step_takes_what_its_program_takes(name, stages):
    """Within 3 %; with a heavier first and last stage where the share is simulated."""
    is_simulated = name in ("zero_bubble_v", "dualpipe_v", "zero_bubble_searched")
    for (p, m), split in itertools.product(SIZES, SPLITS):
        if name == "zero_bubble_searched" and p > 4:
            continue
        schedule = make_schedule(name, p, m, stages)
        for ends in [(1.0, 1.0)] + [(1.1, 1.3)] * is_simulated:
            step, busy = simulated(schedule, *split, ends)
            share = bubble_share(name, p, m, stages, StageShares(*split, *ends))
            predicted = m * max(busy) + share * (sum(busy) - max(busy)) / stages
            assert predicted == pytest.approx(step, rel=0.03), (p, m, split, ends)


def test_searched_orders_are_not_timed_as_1f1b():
    costs = transformer_costs(TransformerShape(24, 2048, 8192, 16, 50304, 2048))
    body, layout = dataclasses.replace(costs, layers=(costs.layers[1],)), PlanLayout(pipeline=4, microbatch=1, batch=12)

    def bubble(schedule):
        chosen = dataclasses.replace(layout, schedule=schedule)
        return predict_time(body, chosen, FORMATS["bf16-mixed"], load_hardware("a100-80")).terms["bubble"]

    assert 0 < bubble("zero_bubble_searched") <= 1.05 * bubble("zero_bubble") < 0.6 * bubble("1f1b")


def test_recomputation_is_not_deferred():
    """What W does not fill is F + I - W, and recomputed forwards belong to I."""
    costs = transformer_costs(TransformerShape(24, 2048, 8192, 16, 50304, 2048))
    body = dataclasses.replace(costs, layers=(costs.layers[1],))
    shares = []
    for recompute in ("none", "full"):
        layout = PlanLayout(pipeline=4, microbatch=1, batch=12, recompute=recompute)
        split = dataclasses.replace(layout, schedule="zero_bubble")
        plain, found = (
            predict_time(body, each, FORMATS["bf16-mixed"], load_hardware("a100-80")).terms["bubble"]
            for each in (layout, split)
        )
        shares.append(found / plain)
    assert 1 / 3 < shares[0] < shares[1] < 1
