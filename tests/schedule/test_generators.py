import pytest

from harness.schedule_proof import action_of, check_schedule, rows_of
from lightning_hybrid.schedule import Action, Kind, chain, simulate
from lightning_hybrid.schedule.generators import (
    eager_1f1b,
    forward_only,
    gpipe,
    interleaved_1f1b,
    make_schedule,
    one_f_one_b,
    zero_bubble,
)


def test_gpipe_runs_all_forwards_then_all_backwards():
    assert rows_of(gpipe(2, 3)) == (
        "0F0 0F1 0F2 0B0 0B1 0B2 0R",
        "1F0 1F1 1F2 1B0 1B1 1B2 1R",
    )


def test_gpipe_with_several_stages_is_breadth_first():
    assert rows_of(gpipe(2, 2, stages_per_rank=2)) == (
        "0F0 0F1 2F0 2F1 2B0 2B1 2R 0B0 0B1 0R",
        "1F0 1F1 3F0 3F1 3B0 3B1 3R 1B0 1B1 1R",
    )


def test_1f1b_alternates_after_a_warmup():
    assert rows_of(one_f_one_b(3, 4)) == (
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3 0R",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3 1R",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2R",
    )


def test_1f1b_with_fewer_microbatches_than_ranks():
    assert rows_of(one_f_one_b(3, 1)) == ("0F0 0B0 0R", "1F0 1B0 1R", "2F0 2B0 2R")


def test_interleaved_1f1b_passes_groups_of_microbatches_through_the_stages():
    assert rows_of(interleaved_1f1b(2, 4, stages_per_rank=2)) == (
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 2R 0B2 0B3 0R",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 3R 1B2 1B3 1R",
    )


def test_interleaved_1f1b_with_a_remainder_enlarges_the_first_group():
    assert rows_of(interleaved_1f1b(2, 3, stages_per_rank=2)) == (
        "0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 2B2 2R 0B0 0B1 0B2 0R",
        "1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 3R 1B0 1B1 1B2 1R",
    )


def test_forward_only_reduces_nothing():
    assert rows_of(forward_only(2, 3)) == ("0F0 0F1 0F2", "1F0 1F1 1F2")
    assert rows_of(forward_only(2, 4, stages_per_rank=2)) == (
        "0F0 0F1 2F0 2F1 0F2 0F3 2F2 2F3",
        "1F0 1F1 3F0 3F1 1F2 1F3 3F2 3F3",
    )


def bubble(schedule, forward_seconds, backward_seconds):
    return simulate(
        schedule,
        chain(schedule.num_stages),
        forward_seconds=forward_seconds,
        backward_seconds=backward_seconds,
    ).bubble


@pytest.mark.parametrize("backward_seconds", [1.0, 2.0])
@pytest.mark.parametrize("p", [1, 2, 4, 7])
def test_bubble_formulas(p, backward_seconds):
    for m in (1, 2, 4, 5, 11):
        known = (p - 1) / (m + p - 1)
        assert bubble(gpipe(p, m), 1.0, backward_seconds) == pytest.approx(known)
        assert bubble(one_f_one_b(p, m), 1.0, backward_seconds) == pytest.approx(known)
        for v in (2, 3):
            interleaved = bubble(interleaved_1f1b(p, m, v), 1.0, backward_seconds)
            if m >= p:  # whether or not p divides m
                assert interleaved == pytest.approx((p - 1) / (v * m + p - 1))
            else:
                assert interleaved <= known + 1e-9


def test_1f1b_keeps_fewer_activations_than_gpipe():
    portals = chain(4)
    assert check_schedule(gpipe(4, 8), portals) == (8, 8, 8, 8)
    assert check_schedule(one_f_one_b(4, 8), portals) == (4, 3, 2, 1)
    assert check_schedule(forward_only(4, 8), portals) == (0, 0, 0, 0)


def test_eager_1f1b_doubles_the_warmup():
    assert rows_of(eager_1f1b(3, 6)) == (
        "0F0 0F1 0F2 0F3 0F4 0B0 0F5 0B1 0B2 0B3 0B4 0B5 0R",
        "1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1B4 1B5 1R",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4 2F5 2B5 2R",
    )
    assert rows_of(eager_1f1b(3, 1)) == ("0F0 0B0 0R", "1F0 1B0 1R", "2F0 2B0 2R")
    assert make_schedule("eager_1f1b", 3, 4) == eager_1f1b(3, 4)
    with pytest.raises(
        ValueError, match=r"schedule='eager_1f1b' runs one stage per rank.*stages_per_rank=2.*interleaved"
    ):
        eager_1f1b(2, 4, 2)
    with pytest.raises(ValueError, match="num_microbatches=0"):
        eager_1f1b(2, 0)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 6])
def test_eager_1f1b_waits_only_for_the_first_and_last_transfer(p):
    for m in (1, 2, 4, 7, 16):
        schedule, portals = eager_1f1b(p, m), chain(p)
        assert check_schedule(schedule, portals) == tuple(min(2 * (p - rank) - 1, m) for rank in range(p))
        for seconds in (0.0, 0.5):  # no more than half a forward, or half a forward and a backward
            costs = {"forward_seconds": 1.0, "backward_seconds": 2.0, "transfer_seconds": seconds}
            ends_of_the_pipeline = 2 * (p - 1) * seconds
            assert simulate(schedule, portals, **costs).makespan_seconds == pytest.approx(
                3.0 * (m + p - 1) + ends_of_the_pipeline
            )
    late = simulate(one_f_one_b(4, 8), chain(4), forward_seconds=1.0, backward_seconds=2.0, transfer_seconds=0.5)
    assert late.makespan_seconds == pytest.approx(3.0 * 11 + 16 * 0.5)  # 1F1B waits for 16 of them


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b"])
def test_gradients_are_summed_in_ascending_order_and_reduced_at_once(name):
    for p, m, v in [(1, 3, 2), (2, 5, 1), (3, 7, 2), (4, 6, 3)]:
        schedule = make_schedule(name, p, m, v)
        for stage in range(schedule.num_stages):
            row = schedule.actions[schedule.rank_of(stage, 0)]
            for kind in (Kind.F, Kind.B):
                assert [a.microbatch for a in row if a.kind is kind and a.stage == stage] == list(range(m))
            assert row.index(Action(Kind.REDUCE, stage)) == row.index(Action(Kind.B, stage, m - 1)) + 1


def test_schedules_by_name():
    assert make_schedule("1f1b", 2, 4) == one_f_one_b(2, 4)
    assert make_schedule("1f1b", 2, 4, 2) == interleaved_1f1b(2, 4, 2)
    assert make_schedule("interleaved_1f1b", 2, 4) == one_f_one_b(2, 4)
    with pytest.raises(ValueError, match="'zigzag'; choose one of 'gpipe', '1f1b', 'eager_1f1b'"):
        make_schedule("zigzag", 2, 4)
    with pytest.raises(ValueError, match="num_microbatches=0"):
        make_schedule("gpipe", 2, 0)


@pytest.mark.parametrize("text", ["2F0", "0B13", "11I4", "3W2", "2R"])
def test_action_text(text):
    assert str(action_of(text)) == text


def test_stages_are_assigned_round_robin():
    schedule = interleaved_1f1b(3, 3, 2)
    assert schedule.num_stages == 6
    assert [schedule.rank_of(stage, 0) for stage in range(6)] == [0, 1, 2, 0, 1, 2]


def test_zero_bubble():
    assert rows_of(zero_bubble(3, 4)) == (
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3 0R",
        "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3 1R",
        "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3 2R",
    )
    assert rows_of(zero_bubble(3, 1)) == ("0F0 0B0 0R", "1F0 1I0 1W0 1R", "2F0 2I0 2W0 2R")
    assert make_schedule("zero_bubble", 3, 4) == zero_bubble(3, 4)
    with pytest.raises(ValueError, match=r"stages_per_rank=2.*interleaved_1f1b"):
        zero_bubble(2, 4, 2)
    with pytest.raises(ValueError, match="num_microbatches=0"):
        zero_bubble(2, 0)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 6])
def test_zero_bubble_has_a_third_of_the_bubble(p):
    for m in (1, 2, 4, 7, 16):
        schedule, known = zero_bubble(p, m), (p - 1) / (3 * m + p - 1)
        assert check_schedule(schedule, chain(p)) == (min(p, m),) * p
        if m >= p:
            assert bubble(schedule, 1.0, 2.0) == pytest.approx(known)
        assert bubble(schedule, 1.0, 2.0) <= bubble(one_f_one_b(p, m), 1.0, 2.0) + 1e-9
        for stage in range(p):
            row = schedule.actions[stage]
            for kinds in ((Kind.B, Kind.I), (Kind.B, Kind.W)):
                assert [a.microbatch for a in row if a.kind in kinds] == list(range(m))
