"""The lost time of synthetic steps is attributed to the cause that was planted."""

import random

import pytest

from lightning_hybrid.schedule import Action, Kind, Span, Timeline, chain, make_schedule, simulate
from lightning_hybrid.schedule.measured.lost_time import (
    LOSSES,
    lost_time,
    mean_of_pipelines,
    measured_schedule,
)
from lightning_hybrid.schedule.simulator import replay

SCHEDULES = pytest.mark.parametrize(
    ("name", "stages_per_rank"),
    [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("zero_bubble", 1), ("eager_1f1b", 1)],
)
NUM_RANKS, NUM_MICROBATCHES = 2, 4


def measured(
    name="1f1b",
    stages_per_rank=1,
    *,
    forward=1.0,
    backward=2.0,
    reduce=0.0,
    transfer=0.0,
    batch_came=(),
    gap=lambda action, previous: 0.0,
    after=0.0,
):
    """The lost time of a simulated step whose ranks began to wait for their batch at -0.5 s, and its timeline.

    ``gap`` returns the seconds that pass before an action, from it and the one before it on its rank; ``after`` are the
    seconds from the last action to the end of the step.
    """
    schedule = make_schedule(name, NUM_RANKS, NUM_MICROBATCHES, stages_per_rank)
    portals = chain(schedule.num_stages)
    costs = {"forward_seconds": forward, "backward_seconds": backward, "reduce_seconds": reduce}
    timeline = simulate(schedule, portals, transfer_seconds=transfer, **costs)
    if not transfer:
        gaps = {
            action: gap(action, previous)
            for row in schedule.actions
            for previous, action in zip((None, *row), row, strict=False)
        }
        seconds = {span.action: span.end - span.start + gaps[span.action] for span in timeline.spans}
        timeline = replay(schedule, portals, seconds, batch_came)
        spans = tuple(span._replace(start=span.start + gaps[span.action]) for span in timeline.spans)
        timeline = Timeline(spans, NUM_RANKS)
    inputs = [(-0.5, ready) for ready in batch_came or [-0.5] * NUM_RANKS]
    end = max(span.end for span in timeline.spans) + after
    own = measured_schedule(timeline, schedule.num_stages)
    return lost_time(timeline, own, portals, inputs=inputs, end=end), timeline


def largest_loss(lost):
    return max(LOSSES, key=lambda cause: getattr(lost, cause))


@SCHEDULES
def test_equal_stages_lose_the_bubble_of_the_schedule_alone(name, stages_per_rank):
    lost, timeline = measured(name, stages_per_rank, batch_came=(0.0, 0.0), after=3.0)
    step = lost.total
    assert step.input == pytest.approx(0.5) and step.optimizer == pytest.approx(3.0)
    assert step.step_seconds == pytest.approx(timeline.makespan_seconds + 3.5)
    assert step.bubble == pytest.approx(timeline.bubble * timeline.makespan_seconds)
    assert step.work + step.bubble == pytest.approx(timeline.makespan_seconds)
    assert step.imbalance == step.variation == step.communication == step.other == 0


@SCHEDULES
def test_slow_stage_is_imbalance(name, stages_per_rank):
    fast = [1.0] * (NUM_RANKS * stages_per_rank - 1)
    slow = {"forward": [*fast, 3.0], "backward": [*(2 * seconds for seconds in fast), 6.0]}
    lost, timeline = measured(name, stages_per_rank, batch_came=(0.0, 0.0), **slow)
    assert largest_loss(lost.total) == "imbalance"
    assert lost.total.bubble < timeline.bubble * timeline.makespan_seconds
    assert lost.total.communication == lost.total.variation == pytest.approx(0.0)
    assert lost.ranks[0].imbalance > lost.ranks[-1].imbalance  # which has the slow stage


@SCHEDULES
def test_slow_link_is_communication(name, stages_per_rank):
    lost, _ = measured(name, stages_per_rank, transfer=2.0)
    ideal, _ = measured(name, stages_per_rank, batch_came=(0.0, 0.0))
    assert largest_loss(lost.total) == "communication"
    assert lost.total.bubble == pytest.approx(ideal.total.bubble)
    assert lost.total.imbalance == lost.total.variation == lost.total.input == pytest.approx(0.0)


def test_reduction_is_communication():
    lost, timeline = measured(reduce=10.0)
    ideal, shorter = measured()
    expected = timeline.makespan_seconds - shorter.makespan_seconds
    assert lost.total.communication - ideal.total.communication == pytest.approx(expected)
    assert lost.total.work == pytest.approx(ideal.total.work)
    assert [row.communication - before.communication for row, before in zip(lost.ranks, ideal.ranks, strict=True)] == (
        pytest.approx([10.0, 10.0])
    )


@pytest.mark.parametrize("came", [(4.0, 4.0), (4.0, 0.0), (0.0, 8.0)], ids=str)
def test_late_batch_is_input(came):
    """Of both ranks, of the first one, for which the other waits, or of the last one."""
    lost, timeline = measured(batch_came=came)
    ideal, _ = measured(batch_came=(0.0, 0.0))
    assert largest_loss(lost.total) == "input"
    assert lost.total.step_seconds == pytest.approx(0.5 + max(span.end for span in timeline.spans))
    assert lost.total.input - ideal.total.input == pytest.approx(lost.total.step_seconds - ideal.total.step_seconds)
    assert [row.input for row in lost.ranks] == pytest.approx([0.5 + ready for ready in came])


def test_the_step_begins_when_the_last_rank_has_ended_the_one_before():
    """Until then the others only wait for it, whether their batch comes or not."""
    schedule, portals = make_schedule("1f1b", NUM_RANKS, NUM_MICROBATCHES), chain(NUM_RANKS)
    timeline = simulate(schedule, portals, forward_seconds=1.0, backward_seconds=2.0)
    end = timeline.makespan_seconds
    lost = lost_time(timeline, schedule, portals, inputs=[(-0.25, 0.0), (-9.0, -3.0)], end=end)
    assert lost.total.step_seconds == pytest.approx(end + 0.25)
    assert lost.total.input == pytest.approx(0.25)
    assert [row.input for row in lost.ranks] == pytest.approx([0.25, 0.0])
    assert [row.step_seconds for row in lost.ranks] == pytest.approx([end + 0.25] * 2)
    unknown = lost_time(timeline, schedule, portals, inputs=[None, None], end=end)
    assert unknown.total.step_seconds == pytest.approx(end) and unknown.total.input == 0


def test_unequal_microbatches_are_variation():
    schedule, portals = make_schedule("1f1b", NUM_RANKS, NUM_MICROBATCHES), chain(NUM_RANKS)
    spans = simulate(schedule, portals, forward_seconds=1.0, backward_seconds=2.0).spans
    seconds = {span.action: span.end - span.start + 2.0 * (span.action.microbatch == 0) for span in spans}
    timeline = replay(schedule, portals, seconds)
    lost = lost_time(timeline, schedule, portals, inputs=[None, None], end=timeline.makespan_seconds)
    assert lost.total.variation > 0 and lost.total.imbalance == pytest.approx(0.0)
    assert lost.total.work == pytest.approx(sum(seconds.values()) / NUM_RANKS)
    assert lost.total.input == lost.total.communication == pytest.approx(0.0)


def test_gap_without_a_message_is_other():
    """Between two gradients of weights no message comes or goes; after a gradient of inputs one goes."""

    def between(action, previous):
        return 3.0 * (action.kind is Kind.W and previous.kind is Kind.W)

    def after_sending(action, previous):
        return 3.0 * (action.kind is Kind.W and previous.kind is Kind.I)

    ideal, _ = measured("zero_bubble")
    host, _ = measured("zero_bubble", gap=between)
    sent, _ = measured("zero_bubble", gap=after_sending)
    assert largest_loss(host.total) == "other" and host.ranks[1].other > 0
    assert host.total.communication == ideal.total.communication
    assert largest_loss(sent.total) == "communication" and sent.total.other == ideal.total.other


@SCHEDULES
@pytest.mark.parametrize("seed", range(4))
def test_causes_and_rows_add_up_to_the_step(name, stages_per_rank, seed):
    chance = random.Random(seed)
    count = NUM_RANKS * stages_per_rank
    lost, timeline = measured(
        name,
        stages_per_rank,
        forward=[chance.uniform(0.5, 3) for _ in range(count)],
        backward=[chance.uniform(0.5, 3) for _ in range(count)],
        reduce=chance.uniform(0, 3),
        batch_came=[chance.uniform(0, 4) for _ in range(NUM_RANKS)],
        gap=lambda action, previous: chance.choice([0.0, chance.uniform(0, 1)]),
        after=chance.uniform(0, 2),
    )
    assert lost.total.step_seconds == pytest.approx(
        0.5 + lost.total.optimizer + max(span.end for span in timeline.spans)
    )
    assert all(seconds >= 0 for row in (lost.total, *lost.ranks) for seconds in row.seconds().values())
    for row in lost.ranks:
        assert row.step_seconds == pytest.approx(lost.total.step_seconds)
    means = [row.work for row in lost.ranks]
    assert lost.total.work == pytest.approx(sum(means) / len(means))


def test_one_rank_without_stages():
    """Two microbatches, an average over replicas, an optimizer's step."""
    spans = [(Kind.F, 0, 1.0, 2.0), (Kind.B, 0, 2.0, 4.0), (Kind.F, 1, 4.0, 5.0), (Kind.B, 1, 5.0, 7.0)]
    timeline = Timeline(
        (
            *(Span(0, Action(kind, 0, microbatch), start, end) for kind, microbatch, start, end in spans),
            Span(0, Action(Kind.REDUCE, 0), 7.0, 9.0),
        ),
        1,
    )
    lost = lost_time(timeline, measured_schedule(timeline, 1), chain(1), inputs=[(-3.0, 0.5)], end=10.0)
    assert lost.total.seconds() == pytest.approx(
        {
            "work": 6.0,
            "bubble": 0.0,
            "imbalance": 0.0,
            "variation": 0.0,
            "communication": 2.0,
            "input": 3.5,
            "other": 0.5,
            "optimizer": 1.0,
        }
    )
    assert mean_of_pipelines([lost, lost]).total == lost.total
    assert len(mean_of_pipelines([lost, lost]).ranks) == 2


def test_repeated_actions_have_no_schedule():
    timeline = simulate(make_schedule("1f1b", 1, 1), chain(1), forward_seconds=1.0, backward_seconds=1.0)
    assert measured_schedule(timeline, 1) is not None
    twice = Timeline((*timeline.spans, *(s._replace(start=s.start + 9, end=s.end + 9) for s in timeline.spans)), 1)
    assert measured_schedule(twice, 1) is None
