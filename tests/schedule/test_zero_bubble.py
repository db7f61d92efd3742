"""ZB-V and DualPipeV are those of torch; a searched schedule keeps its limit and is no longer than known ones."""

import itertools
import random
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining.schedules import ScheduleDualPipeV, ScheduleZBVZeroBubble

from harness.schedule_proof import check_schedule, rows_of
from harness.schedules import portals_of
from lightning_hybrid.schedule import (
    Action,
    Kind,
    StageCosts,
    chain,
    check_program,
    lower,
    make_schedule,
    rank_of_stage,
    simulate,
    stages_of_rank,
)
from lightning_hybrid.schedule.generators import (
    dualpipe_v,
    forward_only,
    one_f_one_b,
    zero_bubble,
    zero_bubble_searched,
    zero_bubble_v,
)
from lightning_hybrid.schedule.in_flight import most_in_flight

SIZES = [(1, 3), (2, 1), (2, 4), (3, 2), (3, 8), (4, 7), (4, 8), (5, 12)]


EQUAL = StageCosts()


def timeline_of(schedule, costs=EQUAL):
    forward, backward = costs.of_stages(schedule.num_stages)
    seconds = {"forward_seconds": forward, "backward_seconds": backward, "transfer_seconds": costs.transfer}
    return simulate(schedule, chain(schedule.num_stages), **seconds)


def uneven(num_stages, seed=0, transfer=0.2):
    draw = random.Random(seed)
    forward = tuple(draw.uniform(0.5, 1.5) for _ in range(num_stages))
    return StageCosts(forward, tuple(2 * seconds for seconds in forward), transfer)


def order_of_torch(schedule_class, num_ranks, num_microbatches, rank):
    """The actions of a rank in torch's schedule, without the pauses."""
    sizes = {"pp_group_size": num_ranks, "_n_microbatches": num_microbatches, "num_stages": 2 * num_ranks}
    row = schedule_class._calculate_single_rank_operations(
        SimpleNamespace(**sizes, _num_stages=2 * num_ranks, rank=rank), rank
    )
    return [str(part) for action in row if action is not None for part in action.sub_actions or (action,)]


def split(words):
    """A row of words in which the backwards of stage 0 are in two parts."""
    return [part for word in words for part in ([f"0I{word[2:]}", f"0W{word[2:]}"] if word[:2] == "0B" else [word])]


@pytest.mark.parametrize(
    ("ours", "of_torch"), [(zero_bubble_v, ScheduleZBVZeroBubble), (dualpipe_v, ScheduleDualPipeV)]
)
@pytest.mark.parametrize("p", [1, 2, 3, 4, 7])
def test_orders_are_those_of_torch(ours, of_torch, p):
    for m in (2 * p, 2 * p + 1, 5 * p):
        for rank, row in enumerate(ours(p, m).actions):
            words = [str(action) for action in row if action.kind is not Kind.REDUCE]
            assert split(words) == split(order_of_torch(of_torch, p, m, rank))


def test_v_placement():
    schedule = zero_bubble_v(3, 4)
    assert [schedule.rank_of(stage, 0) for stage in range(6)] == [0, 1, 2, 2, 1, 0]
    assert [stages_of_rank(rank, 3, 2, "v") for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert [rank_of_stage(stage, 3) for stage in range(6)] == [0, 1, 2, 0, 1, 2]


def test_zero_bubble_v_of_two_ranks():
    assert rows_of(zero_bubble_v(2, 3)) == (
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0B0 3F2 3I2 3W2 3R 0B1 0B2 0R",
        "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 2R 1W2 1R",
    )


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_zero_bubble_v_waits_only_for_the_first_forwards(p):
    for m in (2 * p - 1, 2 * p, 4 * p + 1):
        schedule = zero_bubble_v(p, m)
        assert timeline_of(schedule).bubble == pytest.approx((p - 1) / (6 * m + p - 1))
        assert most_in_flight(schedule) == [2 * p] * p  # two stages of p microbatches, as 1F1B holds them
        assert max(most_in_flight(dualpipe_v(p, m))) <= 2 * p + 1


@pytest.mark.parametrize("generate", [zero_bubble_v, dualpipe_v, zero_bubble_searched])
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_schedules_run_to_their_end_on_every_channel(generate, p, m):
    schedule = generate(p, m, 2)
    for kind in ("chain", "skips", "all pairs"):
        portals = portals_of(kind, 2 * p)
        check_schedule(schedule, portals)
        check_program(lower(schedule, portals))
        check_program(lower(schedule, portals, channel="tags", post_ahead=2, idle_within=4))
    for row in schedule.actions:
        stages = sorted({action.stage for action in row})
        for stage in stages:
            for kinds in ((Kind.F,), (Kind.B, Kind.I), (Kind.B, Kind.W)):
                assert [a.microbatch for a in row if a.stage == stage and a.kind in kinds] == list(range(m))
        # One order of reductions for all numbers of microbatches, which replicas may have different ones of.
        assert [a.stage for a in row if a.kind is Kind.REDUCE] == stages[::-1]


def test_forwards_in_v_placement():
    schedule = forward_only(2, 4, 2, "v")
    assert rows_of(schedule) == ("0F0 0F1 0F2 3F0 0F3 3F1 3F2 3F3", "1F0 2F0 1F1 2F1 1F2 2F2 1F3 2F3")
    for p, m in SIZES:
        schedule = forward_only(p, m, 2, "v")
        check_program(lower(schedule, chain(2 * p)))
        if m >= 2 * p:
            assert timeline_of(schedule).makespan_seconds == 2 * (m + p - 1)  # the last rank is busy all the time


@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize("p", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_search_is_not_longer_than_known_schedules(p, each):
    known = (one_f_one_b, zero_bubble) if each == 1 else (zero_bubble_v,)
    shorter = 0
    for m in (p, 2 * p, 4 * p + 1):
        for costs in (StageCosts(), StageCosts(1.0, 2.0, 0.3), *(uneven(p * each, seed) for seed in range(4))):
            schedule = zero_bubble_searched(p, m, each, costs=costs)
            assert max(most_in_flight(schedule)) <= each * p
            found = timeline_of(schedule, costs).makespan_seconds
            least = min(timeline_of(generate(p, m, each), costs).makespan_seconds for generate in known)
            assert found <= least * (1 + 1e-9)
            shorter += found < least * 0.999
    assert shorter or (p, each) == (2, 1), "the search never finds anything"


@pytest.mark.parametrize("each", [1, 2])
def test_search_keeps_its_limit_and_uses_it(each):
    p, m = 4, 12
    for costs in (StageCosts(), uneven(p * each, 1)):
        times = []
        for limit in (1, 2, 3, 4, 6, 8):
            schedule = zero_bubble_searched(p, m, each, max_in_flight=limit, costs=costs)
            check_schedule(schedule, chain(p * each))
            check_program(lower(schedule, chain(p * each)))
            assert max(most_in_flight(schedule)) <= each * limit
            times.append(timeline_of(schedule, costs).makespan_seconds)
        assert times[0] > times[1] > times[3] >= times[5]
        work = m * max(
            sum(sum(seconds[stage] for seconds in costs.of_stages(p * each)) for stage in stages)
            for stages in (stages_of_rank(rank, p, each, "v" if each == 2 else "round_robin") for rank in range(p))
        )
        assert times[0] > 2 * work > 1.4 * times[-1]


def test_search_with_few_microbatches_beats_zb_v():
    found = timeline_of(zero_bubble_searched(4, 4, 2)).makespan_seconds
    assert found < timeline_of(zero_bubble_v(4, 4)).makespan_seconds


def test_search_depends_on_costs():
    equal = zero_bubble_searched(4, 8, 2)
    assert any(zero_bubble_searched(4, 8, 2, costs=uneven(8, seed)) != equal for seed in range(4))
    with pytest.raises(ValueError, match="forward costs are 3 for 2 stages"):
        zero_bubble_searched(2, 8, costs=StageCosts((1.0, 1.0, 1.0)))


def test_search_with_stages_that_cost_nothing():
    for forward in ((0.0, 1.0, 0.0, 2.0), (0.0,) * 4):
        costs = StageCosts(forward, tuple(2 * seconds for seconds in forward))
        schedule = zero_bubble_searched(4, 5, costs=costs, max_in_flight=2)
        check_schedule(schedule, chain(4))
        check_program(lower(schedule, chain(4)))


def test_first_stage_defers_no_weights_without_need():
    for schedule in (zero_bubble_v(4, 12), zero_bubble_searched(4, 12)):
        row = schedule.actions[0]
        for one, other in itertools.pairwise(row):
            assert (one.kind, other) != (Kind.I, Action(Kind.W, 0, one.microbatch)) or one.stage != 0


def test_names_and_sizes():
    assert make_schedule("zero_bubble_v", 2, 4) == make_schedule("zero_bubble_v", 2, 4, 2) == zero_bubble_v(2, 4)
    assert make_schedule("dualpipe_v", 2, 4) == dualpipe_v(2, 4)
    assert make_schedule("zero_bubble_searched", 2, 4, max_in_flight=1).name == "zero_bubble_searched"
    with pytest.raises(ValueError, match=r"'zero_bubble_v' runs two stages per rank, not stages_per_rank=3"):
        make_schedule("zero_bubble_v", 2, 4, 3)
    with pytest.raises(ValueError, match=r"one or two stages per rank, not stages_per_rank=3"):
        make_schedule("zero_bubble_searched", 2, 4, 3)
    with pytest.raises(ValueError, match=r"max_microbatches_in_flight=2 limits the search.*schedule='1f1b'"):
        make_schedule("1f1b", 2, 4, max_in_flight=2)
    with pytest.raises(ValueError, match="at least one microbatch, but max_microbatches_in_flight=0"):
        make_schedule("zero_bubble_searched", 2, 4, max_in_flight=0)
    with pytest.raises(ValueError, match="num_microbatches=0"):
        make_schedule("dualpipe_v", 2, 0)
