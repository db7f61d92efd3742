"""The predicted wait of the slowest rank against the simulation of the schedule's own program."""

import dataclasses
import itertools

import pytest

from lightning_hybrid.predict.bubble import StageSeconds, bubble_seconds, program_seconds
from lightning_hybrid.predict.costs.transformer import TransformerShape, transformer_costs
from lightning_hybrid.predict.hardware import load_hardware
from lightning_hybrid.predict.layout import FORMATS, PlanLayout
from lightning_hybrid.predict.time import predict_time
from lightning_hybrid.schedule import Kind, chain, make_schedule
from lightning_hybrid.schedule.simulator import replay

SCHEDULES = [
    ("gpipe", 1),
    ("gpipe", 2),
    ("1f1b", 1),
    ("eager_1f1b", 1),
    ("interleaved_1f1b", 2),
    ("zero_bubble", 1),
    ("zero_bubble_v", 2),
    ("dualpipe_v", 2),
    ("zero_bubble_searched", 1),
    ("zero_bubble_searched", 2),
]
SPLITS = [(1 / 3, 1 / 3), (0.25, 0.25), (0.35, 0.0)]  # forward, gradients of weights; all make 1
TIMES_OF_STAGES = {
    "equal": lambda count: [1.0] * count,
    "heavy ends": lambda count: [1.1, *[1.0] * (count - 2), 1.3],
    "light first stage": lambda count: [0.6, *[1.0] * (count - 2), 1.6],
    "slow stage in the middle": lambda count: [1.0] * (count // 2) + [1.4] + [1.0] * (count - count // 2 - 1),
    "every second stage slower": lambda count: [1.0 + 0.2 * (stage % 2) for stage in range(count)],
}


def stages_of(times, split):
    """Stages of these times; the last one, a loss, has equal parts, where stages differ."""
    forward, weights = split
    stages = [StageSeconds(forward * time, (1 - forward - weights) * time, weights * time) for time in times]
    return stages if len(set(times)) == 1 else [*stages[:-1], StageSeconds(*[times[-1] / 3] * 3)]


def simulated(schedule, stages):
    """Seconds of a step."""

    def seconds(action):
        forward, inputs, weights = stages[action.stage]
        return {Kind.F: forward, Kind.I: inputs, Kind.W: weights, Kind.B: inputs + weights}.get(action.kind, 0.0)

    of_actions = {action: seconds(action) for row in schedule.actions for action in row}
    return replay(schedule, chain(schedule.num_stages), of_actions).makespan_seconds


def predicted(schedule, num_microbatches, stages):
    ranks = [{} for _ in range(schedule.num_ranks)]
    for number, stage in enumerate(stages):
        ranks[schedule.rank_of(number, 0)][number] = stage
    busy = max(sum(stage.total for stage in held.values()) for held in ranks)
    return num_microbatches * busy + bubble_seconds(schedule.name, num_microbatches, ranks)


@pytest.mark.parametrize("times", TIMES_OF_STAGES)
@pytest.mark.parametrize(("name", "stages_per_rank"), SCHEDULES)
def test_a_step_takes_what_its_program_takes(name, stages_per_rank, times):
    """Exactly, up to 8 ranks and 4 rounds of microbatches; beyond, within 2 % of 8 and 3.5 % of 12 ranks."""
    for (p, m, tolerance), split in itertools.product(
        [(2, 3, 1e-9), (4, 3, 1e-9), (4, 16, 1e-9), (8, 12, 1e-9), (8, 45, 0.02), (12, 30, 0.035)], SPLITS
    ):
        if name == "zero_bubble_searched" and p > 4:
            continue
        schedule = make_schedule(name, p, m, stages_per_rank)
        stages = stages_of(TIMES_OF_STAGES[times](schedule.num_stages), split)
        assert predicted(schedule, m, stages) == pytest.approx(simulated(schedule, stages), rel=tolerance), (
            p,
            m,
            split,
        )


def test_program_is_the_simulators():
    schedule = make_schedule("zero_bubble_v", 4, 9, 2)
    stages = [StageSeconds(1.0 + 0.1 * stage, 0.7 + 0.05 * stage, 0.9) for stage in range(8)]
    found = program_seconds("zero_bubble_v", 4, 9, stages)
    assert found == pytest.approx(simulated(schedule, stages), rel=1e-12)


def test_a_slow_stage_in_the_middle_is_not_waited_for_by_all():
    """Eager 1F1B hides a part of the others' warm-up behind the slow stage; the closed form is 8 % too long."""
    schedule = make_schedule("eager_1f1b", 8, 12, 1)
    stages = stages_of(TIMES_OF_STAGES["slow stage in the middle"](8), (1 / 3, 1 / 3))
    closed_form = 11 * max(stage.total for stage in stages) + sum(stage.total for stage in stages)
    assert predicted(schedule, 12, stages) < closed_form / 1.08


def test_searched_orders_are_not_timed_as_1f1b():
    costs = transformer_costs(TransformerShape(24, 2048, 8192, 16, 50304, 2048))
    body, layout = dataclasses.replace(costs, layers=(costs.layers[1],)), PlanLayout(pipeline=4, microbatch=1, batch=12)

    def bubble(schedule):
        chosen = layout.replaced(schedule=schedule)
        return predict_time(body, chosen, FORMATS["bf16-mixed"], load_hardware("a100-80")).terms["bubble"]

    assert 0 < bubble("zero_bubble_searched") <= 1.05 * bubble("zero_bubble") < 0.6 * bubble("1f1b")


def test_recomputation_is_not_deferred():
    """What W does not fill is F + I - W, and recomputed forwards belong to I."""
    costs = transformer_costs(TransformerShape(24, 2048, 8192, 16, 50304, 2048))
    body = dataclasses.replace(costs, layers=(costs.layers[1],))
    shares = []
    for recompute in ("none", "full"):
        layout = PlanLayout(pipeline=4, microbatch=1, batch=12, recompute=recompute)
        split = layout.replaced(schedule="zero_bubble")
        plain, found = (
            predict_time(body, each, FORMATS["bf16-mixed"], load_hardware("a100-80")).terms["bubble"]
            for each in (layout, split)
        )
        shares.append(found / plain)
    assert 1 / 3 < shares[0] < shares[1] < 1
