import dataclasses
import re

import pytest

from harness.schedule_proof import action_of, check_schedule
from harness.schedules import GENERATORS, portals_of
from lightning_hybrid.errors import ScheduleError
from lightning_hybrid.schedule import (
    Compute,
    Message,
    Portals,
    Receive,
    Schedule,
    Send,
    chain,
    check_program,
    lower,
    simulate,
)
from lightning_hybrid.schedule.actions import made_by, needed_by
from lightning_hybrid.schedule.generators import (
    eager_1f1b,
    forward_only,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    zero_bubble,
)


def test_lowered_program():
    program = lower(one_f_one_b(2, 2), chain(2))
    assert [" ".join(map(str, row)) for row in program.instructions] == [
        "0F0 send(0>1F0) 0F1 send(0>1F1) recv(1>0B0) recv(1>0B1) 0B0 0B1 0R",
        "recv(0>1F0) recv(0>1F1) 1F0 1B0 send(1>0B0) 1F1 1B1 send(1>0B1) 1R",
    ]


def check_programs(schedule, portals):
    """Prove its programs for both kinds of channels, and wherever receives are posted."""
    check_program(lower(schedule, portals))
    for post_ahead, within in ((0, 0), (2, 0), (2, 3), (2, 100)):
        check_program(lower(schedule, portals, post_ahead=post_ahead, channel="tags", idle_within=within))


@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["chain", "skips", "all pairs"])
def test_every_schedule_is_proved_with_every_kind_of_portals(kind, p):
    for v in (1, 2, 3):
        portals = portals_of(kind, p * v)
        for m in range(1, 10) if kind == "chain" else (1, 2, 5):
            for generate in GENERATORS:
                schedule = generate(p, m, v)
                in_flight = check_schedule(schedule, portals)
                assert max(in_flight) <= v * m
                check_programs(schedule, portals)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("kind", ["chain", "skips", "all pairs"])
def test_single_stage_schedules_are_proved(kind, p):
    portals = portals_of(kind, p)
    for m in range(1, 10) if kind == "chain" else (1, 2, 5):
        for generate in (zero_bubble, eager_1f1b):
            schedule = generate(p, m)
            check_schedule(schedule, portals)
            check_programs(schedule, portals)


def test_input_gradients_are_sent_before_weight_gradients():
    [_, row] = lower(zero_bubble(2, 3), chain(2)).instructions
    words = [str(instruction) for instruction in row]
    assert words.index("1I2") < words.index("send(1>0B2)") < words.index("1W2")


def test_tagged_last_stage_posts_its_receive_before_it_sends():
    schedule, portals = one_f_one_b(4, 8), chain(4)
    queue, tags = (lower(schedule, portals, channel=channel).instructions[-1] for channel in ("queue", "tags"))
    receive, send = Receive(Message("forward", 2, 3, 4)), Send(Message("backward", 3, 2, 3))
    assert queue.index(send) < queue.index(receive)
    assert tags.index(receive) < tags.index(send)
    with pytest.raises(ScheduleError, match="deadlock"):  # and so it must not run where there is a queue
        check_program(dataclasses.replace(lower(schedule, portals, channel="tags"), channel="queue"))


def test_small_messages_are_received_while_idle():
    schedule, portals = one_f_one_b(4, 8), chain(4)
    rows = [" ".join(map(str, r)) for r in lower(schedule, portals, channel="tags", idle_within=100).instructions]
    assert rows[3].startswith(" ".join(f"recv(2>3F{m})" for m in range(8)) + " 3F0")
    gradients = [f"recv(1>0B{m})" for m in range(5)]
    assert rows[0].index(gradients[0]) > rows[0].index("0F3")  # the first forwards are not delayed by any
    assert " ".join(gradients) + " 0B0" in rows[0]
    near = lower(schedule, portals, channel="tags", idle_within=2)
    assert max(check_program(near)) < max(check_program(lower(schedule, portals, channel="tags", idle_within=100)))


def test_tagged_unposted_receive_is_found():
    program = lower(one_f_one_b(2, 2), chain(2), channel="tags")
    rows = (
        program.instructions[0],
        tuple(i for i in program.instructions[1] if i != Receive(Message("forward", 0, 1, 1))),
    )
    with pytest.raises(ScheduleError, match="rank 0 waits at send"):
        check_program(dataclasses.replace(program, instructions=rows))


def test_posting_ahead_needs_one_buffer_per_peer():
    schedule, portals = one_f_one_b(4, 16), chain(4)
    assert check_program(lower(schedule, portals, post_ahead=0)) == (1, 2, 2, 1)
    assert check_program(lower(schedule, portals)) == (2, 2, 2, 2)
    for post_ahead in (2, 3, 100):
        assert max(check_program(lower(schedule, portals, post_ahead=post_ahead))) <= 2 + 2 * post_ahead


def computes_before(program):
    """By receive, how many computes stand before it in its row."""
    return {
        instruction: sum(isinstance(other, Compute) for other in row[:index])
        for row in program.instructions
        for index, instruction in enumerate(row)
        if isinstance(instruction, Receive)
    }


@pytest.mark.parametrize(
    ("schedule", "ahead", "count"),
    [
        (one_f_one_b(2, 8), 8, 16),
        (one_f_one_b(4, 8), 27, 48),
        (interleaved_1f1b(2, 8, 2), 31, 48),
        (interleaved_1f1b(4, 8, 2), 86, 112),
        (zero_bubble(4, 8), 39, 48),
        (interleaved_1f1b(3, 1, 2), 3, 10),  # 6, if a receive could pass a compute on which its message depends
    ],
    ids=lambda value: f"{value.name}-{value.num_ranks}" if isinstance(value, Schedule) else "",
)
def test_receives_are_posted_one_compute_ahead(schedule, ahead, count):
    portals = chain(schedule.num_stages)
    late, posted = (computes_before(lower(schedule, portals, post_ahead=each)) for each in (0, 1))
    assert len(posted) == count
    assert [late[receive] - posted[receive] for receive in posted].count(1) == ahead


@pytest.mark.parametrize("generate", [gpipe, interleaved_1f1b, forward_only])
@pytest.mark.parametrize("m", [1, 2])
def test_receive_posted_before_what_its_message_depends_on_is_found(generate, m):
    program = lower(generate(3, m, 2), chain(6))
    row = list(program.instructions[0])  # stages 0 and 3; what stage 3 receives comes from stage 0
    receive = Receive(Message("forward", 2, 3, 0))
    row.remove(receive)
    row.insert(0, receive)
    planted = dataclasses.replace(program, instructions=(tuple(row), *program.instructions[1:]))
    with pytest.raises(ScheduleError, match=re.escape("recv(2>3F0) of rank 0 is posted before 0F0, on which")):
        check_program(planted)
    check_program(dataclasses.replace(planted, channel="tags"))  # where the device waits for no receive


def test_inputs_and_outputs_of_actions():
    portals = Portals(frozenset({(0, 1), (1, 2), (0, 2)}), frozenset({(0, 1), (0, 2)}))
    assert needed_by(action_of("2F3"), portals) == (Message("forward", 0, 2, 3), Message("forward", 1, 2, 3))
    assert made_by(action_of("0F3"), portals) == (Message("forward", 0, 1, 3), Message("forward", 0, 2, 3))
    assert needed_by(action_of("0B3"), portals) == (Message("backward", 1, 0, 3), Message("backward", 2, 0, 3))
    assert needed_by(action_of("0I3"), portals) == needed_by(action_of("0B3"), portals)
    assert needed_by(action_of("1B3"), portals) == ()
    assert made_by(action_of("2I3"), portals) == (Message("backward", 2, 0, 3),)
    assert made_by(action_of("2W3"), portals) == needed_by(action_of("2R"), portals) == ()


def test_split_backward_programs():
    rows = ("0F0 0F1 0I0 0W0 0I1 0W1 0R", "1F0 1I0 1F1 1I1 1W0 1W1 1R")
    schedule = schedule_of(*rows, num_microbatches=2)
    assert check_schedule(schedule, chain(2)) == (2, 2)
    check_program(lower(schedule, chain(2)))
    timeline = simulate(schedule, chain(2), forward_seconds=1.0, backward_seconds=2.0)
    assert sum(timeline.busy_seconds) == 2 * 2 * 3.0


def schedule_of(*rows, num_microbatches):
    actions = tuple(tuple(map(action_of, row.split())) for row in rows)
    return Schedule("drawn", len(rows), 1, num_microbatches, actions)


@pytest.mark.parametrize(
    ("rows", "message", "pointer"),
    [
        (("0B0 0F0 0R", "1F0 1B0 1R"), "rank 0 waits at 0B0 for 1B0, 0F0", "0B0  <-- ERROR HERE"),
        (("0F0 0B0 0R", "1B0 1F0 1R"), "rank 1 waits at 1B0 for 1F0", "1B0  <-- ERROR HERE"),
        (("0F0 0B0 0R", "1F0 1F0 1B0 1R"), "1F0 is done twice", "1F0  1F0  <-- ERROR HERE"),
        (("0F0 0B0 0R", "1F0 1R"), "stage 1 does F for microbatch 0 but must do B+F or F+I+W", None),
        (("0F0 0B0 0R", "1F0 1I0 1R"), "stage 1 does F+I for microbatch 0", None),
        (("0F0 0B0 1B0 0R", "1F0 1R"), "1B0 stands on rank 0 but stage 1 is on rank 1", "1B0  <-- ERROR HERE"),
        (("0F0 0B0 0R", "1F0 1B0"), "1R, the gradient reduction of stage 1, is missing", None),
        (("0F0 0R 0B0", "1F0 1B0 1R"), "rank 0 waits at 0R for 0B0", "0R  <-- ERROR HERE"),
        (("0F0 0B0 0R", "1F0 1B0 1F1 1R"), "1F1 is of a microbatch that does not exist", "1F1  <-- ERROR HERE"),
        (("0F0 0B0 0R", "1F0 1B0 2F0 1R"), "2F0 is of a stage that does not exist", "2F0  <-- ERROR HERE"),
    ],
)
def test_wrong_schedule_is_shown_with_its_position(rows, message, pointer):
    with pytest.raises(ScheduleError, match=re.escape(message)) as error:
        check_schedule(schedule_of(*rows, num_microbatches=1), chain(2))
    assert "\nrank 0: " in str(error.value)
    assert "\nrank 1: " in str(error.value)
    assert (pointer or "rank") in str(error.value)


def test_deadlock_names_all_waiting_ranks():
    rows = ("0F0 0B0 0F1 0B1 0R", "1F0 1F1 1B0 1B1 1R")
    with pytest.raises(ScheduleError) as error:
        check_schedule(schedule_of(*rows, num_microbatches=2), chain(2))
    assert str(error.value).splitlines() == [
        "schedule 'drawn' cannot continue: every rank waits for another",
        "  rank 0 waits at 0B0 for 1B0",
        "  rank 1 waits at 1F1 for 0F1",
        "rank 0: 0F0  0B0  <-- ERROR HERE  0F1  0B1  0R",
        "rank 1: 1F0  1F1  <-- ERROR HERE  1B0  1B1  1R",
    ]


def test_portals_beyond_the_last_stage_are_refused():
    with pytest.raises(ScheduleError, match=r"has 2 stages but portals lead to later ones: \[\(1, 2\)\]"):
        check_schedule(gpipe(2, 1), chain(3))


def test_portals_point_forward_and_gradients_backward():
    with pytest.raises(ValueError, match=r"do not: \[\(1, 1\), \(2, 1\)\]"):
        Portals(frozenset({(2, 1), (1, 1), (0, 1)}), frozenset())
    with pytest.raises(ValueError, match=r"add these pairs to forward: \[\(0, 2\)\]"):
        Portals(frozenset({(0, 1)}), frozenset({(0, 2)}))


F0, F1, B0 = Message("forward", 0, 1, 0), Message("forward", 0, 1, 1), Message("backward", 1, 0, 0)


def edited(*edits):
    """The program of 1F1B on two ranks, after some edits of its rows: (rank, instruction, offset or None to drop)."""
    program = lower(one_f_one_b(2, 2), chain(2))
    rows = [list(row) for row in program.instructions]
    for rank, instruction, offset in edits:
        index = rows[rank].index(instruction)
        rows[rank].pop(index)
        if offset is not None:
            rows[rank].insert(index + offset, instruction)
    return dataclasses.replace(program, instructions=tuple(map(tuple, rows)))


def test_crossing_sends_without_a_posted_receive_deadlock():
    # Rank 1 posts its second receive only after it has sent a gradient, while rank 0 sends both activations first.
    with pytest.raises(ScheduleError) as error:
        check_program(edited((1, Receive(F1), 3)))
    assert str(error.value).splitlines() == [
        "deadlock: transfer number 1 between ranks 0 and 1 does not match, so both wait forever",
        "  rank 0 waits at send(0>1F1)",
        "  rank 1 waits at send(1>0B0)",
        "rank 0: 0F0  send(0>1F0)  0F1  send(0>1F1)  <-- ERROR HERE  recv(1>0B0)  recv(1>0B1)  0B0  0B1  0R",
        "rank 1: recv(0>1F0)  1F0  1B0  send(1>0B0)  <-- ERROR HERE  recv(0>1F1)  1F1  1B1  send(1>0B1)  1R",
    ]


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ([(1, Send(B0), None)], "does not match"),
        ([(0, Send(F0), None)], "does not match"),
        ([(1, Receive(F0), 2), (1, Receive(F1), 2)], "no receive of it is posted before"),
        ([(0, Send(F0), -1)], "send(0>1F0) precedes the action that computes it"),
        ([(0, Send(F0), 2)], "does not match"),
        ([(0, Compute(action_of("0B1")), None)], "does not compute the actions of schedule '1f1b'"),
        ([(0, Receive(Message("backward", 1, 0, 1)), None)], "rank 0 waits at 0B1 for 1>0B1 (no receive"),
        ([(1, Send(Message("backward", 1, 0, 1)), None)], "rank 0 waits at 0B1 for 1>0B1\n"),
    ],
)
def test_wrong_program_is_shown_with_its_position(edits, message):
    program = edited(*edits)
    with pytest.raises(ScheduleError, match=re.escape(message)) as error:
        check_program(program)
    assert "\nrank 1: " in str(error.value)


def test_unmatched_transfer_is_found():
    program = lower(gpipe(2, 1), chain(2))
    stray = Send(Message("forward", 0, 1, 0))
    rows = (program.instructions[0], (*program.instructions[1], Receive(Message("forward", 0, 1, 7))))
    with pytest.raises(ScheduleError, match=r"recv\(0>1F7\) of rank 1 has no matching transfer on rank 0"):
        check_program(dataclasses.replace(program, instructions=rows))
    rows = ((*program.instructions[0], stray), program.instructions[1])
    with pytest.raises(ScheduleError, match=r"send\(0>1F0\) occurs twice"):
        check_program(dataclasses.replace(program, instructions=rows))
