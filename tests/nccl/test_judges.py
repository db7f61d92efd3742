"""Each judge finds its planted fault in traces made by hand, and none without it.

A trace is a row of words: ``send:A01`` launches a send on communicator A01, of ranks 0 and 1; ``wait:0`` lets the
stream wait for this rank's launch 0; ``gloo:A01`` is an operation of the host; ``all:A01=8`` has 8 elements,
``all:A01@1`` root 1.
"""

import re
from dataclasses import replace

import pytest

from harness.nccl import judges
from harness.nccl.replay import Machine, Replay
from harness.nccl.trace import Launch, Mark, Objects, Ops, Sync, Trace, Violation, Wait


def trace(rank, row):
    numbers = iter(range(1000))
    return Trace(rank, [event(word, numbers) for word in row.split()])


def event(word, numbers):
    kind, _, rest = word.partition(":")
    if kind in ("ops", "mm", "sync", "step"):
        plain = {"ops": Ops(1), "mm": Ops(2, products=1), "sync": Sync("item", "a.py:1 f"), "step": Mark("training")}
        return plain[kind]
    if kind == "wait":
        return Wait(int(rest))
    comm, size, root = re.fullmatch(r"(\w+)(?:=([\d,]+))?(?:@(\d))?", rest).groups()
    members = tuple(map(int, re.findall(r"\d", comm)))
    sizes = tuple(map(int, (size or "4").split(",")))
    is_host = kind == "gloo"
    number = next(numbers)
    return Launch(number, comm, members, kind, "float32", sizes, int(root or -1), 4 * sum(sizes), is_host, "a.py:1 f")


def traces(*rows):
    return [trace(rank, row) for rank, row in enumerate(rows)]


@pytest.mark.parametrize(
    ("fault", "clean"),
    [
        (("all:A01=8 all:A01", "all:A01=9 all:A01"), ("all:A01=8 all:A01", "all:A01=8 all:A01")),
        (("all:A01@0", "all:A01@1"), ("all:A01@1", "all:A01@1")),
        (("all:A01 gather:A01", "gather:A01 all:A01"), ("gather:A01 all:A01", "gather:A01 all:A01")),
        (("send:A01 recv:A01", "send:A01 recv:A01"), ("send:A01 recv:A01", "recv:A01 send:A01")),
        (("send:A01=1 send:A01=2", "recv:A01=2 recv:A01=1"), ("send:A01=1 send:A01=2", "recv:A01=1 recv:A01=2")),
        (("all:A01", ""), ("", "")),
        # To ranks 0 and 1, then from them.
        (("alltoall:A01=1,2,1,3", "alltoall:A01=4,5,2,5"), ("alltoall:A01=1,2,1,3", "alltoall:A01=3,5,2,5")),
    ],
    ids=["size", "root", "kind", "pair", "order of a pair", "number", "exchange"],
)
def test_operations_of_a_communicator_agree(fault, clean):
    assert judges.disagreements(traces(*fault))
    assert not judges.disagreements(traces(*clean))


def test_dtypes_agree():
    one, other = traces("all:A01", "all:A01")
    other.events[0] = replace(other.events[0], dtype="bfloat16")
    assert judges.disagreements([one, other])


def test_a_host_that_waits_for_what_needs_it_is_stuck():
    # Rank 1 sends after it has met rank 0 over gloo, and rank 0 reads what it receives before.
    sender = "gloo:G01 wait:0 send:A01 wait:1"
    [found] = [text for text in judges.stuck(traces("recv:A01 wait:0 sync gloo:G01 wait:1", sender)) if "sync" in text]
    assert found.startswith("rank 0 (main) waits at sync item (a.py:1 f)")
    assert not judges.stuck(traces("recv:A01 wait:0 gloo:G01 wait:1 sync", sender))


def test_an_operation_that_one_rank_never_begins_never_ends():
    assert judges.stuck(traces("all:A01", "")) == ["rank 0: all number 0 on A01 (a.py:1 f) never ends"]


def test_streams_wait_before_later_launches():
    # Each sends what it has received from the other.
    crossed = traces("recv:A01 wait:0 send:B01", "recv:B01 wait:0 send:A01")
    assert len(judges.stuck(crossed)) == 4
    assert not judges.stuck(traces("send:B01 recv:A01 wait:1", "recv:B01 wait:0 send:A01"))


def test_one_queue_starts_operations_in_their_order():
    # The second receive of rank 0 waits for the first one, behind it the send that rank 2 needs, so that rank 1 sends.
    others = "gloo:G12 wait:0 send:A01 send:A01", "recv:A02 wait:0 sync gloo:G12 wait:1"
    fault = traces("recv:A01 recv:A01 send:A02", *others)
    assert judges.stuck_in_one_queue(fault) and not judges.stuck(fault)
    assert not judges.stuck_in_one_queue(traces("send:A02 recv:A01 recv:A01", *others))


def test_a_first_use_that_connects_blocks_hosts():
    fault = traces("send:A01 send:A02", "send:A12 recv:A01", "recv:A02 recv:A12")
    assert len(judges.stuck_when_connecting(fault)) == 3 and not judges.stuck(fault)
    assert not judges.stuck_when_connecting(traces("send:A01 send:A02", "recv:A01 send:A12", "recv:A02 recv:A12"))


def test_connected_communicators_block_no_host():
    connected = "all:A01 all:A02", "all:A01 all:A12", "all:A02 all:A12"
    uses = "send:A01 send:A02", "send:A12 recv:A01", "recv:A02 recv:A12"
    assert not judges.stuck_when_connecting(traces(*(" ".join(pair) for pair in zip(connected, uses, strict=True))))


def test_a_receive_posted_before_what_it_depends_on_is_stuck_at_an_allocation():
    other = "recv:B01 wait:0 send:A01"
    fault = traces("recv:A01 ops send:B01 wait:0", other)
    [found] = judges.stuck_at_allocations(fault)
    assert found.startswith("rank 0 waits for its device, and recv number 0 on A01") and not judges.stuck(fault)
    assert not judges.stuck_at_allocations(traces("ops send:B01 recv:A01 wait:1 ops", other))


def test_threads_of_a_rank_go_on_by_themselves():
    one, other = traces("all:A01 wait:0 sync", "all:A01")
    one.events.insert(0, Launch(7, "B01", (0, 1), "all", "float32", (4,), thread="writer"))
    one.events.insert(1, Wait(7, thread="writer"))
    one.events.insert(2, Sync("item", thread="writer"))
    replay = Replay([one, other], Machine())
    replay.run()
    assert next(text.split(" waits")[0] for text in replay.stuck()) == "rank 0 (writer)"
    assert not any("rank 0 (main)" in text for text in replay.stuck())


def test_violations_are_faults():
    one = Trace(0, [Violation("dropped", "allreduce", "a.py:1 f")])
    assert judges.violations([one]) == ["rank 0: dropped: allreduce (a.py:1 f)"]


def test_tensors_of_the_device_among_objects_are_faults():
    one = Trace(0, [Objects("gather_object", line="a.py:1 f"), Objects("gather_object", ("float32 (3,)",), "b.py:1 f")])
    assert judges.device_objects([one]) == ["rank 0: gather_object of float32 (3,) (b.py:1 f)"]


def test_bytes_in_flight_do_not_grow():
    two = traces("step all:A0 all:A0 wait:0 wait:1 step")
    four = traces("step all:A0 all:A0 all:A0 all:A0 wait:0 wait:1 wait:2 wait:3 step")
    in_turn = traces("step all:A0 all:A0 wait:0 all:A0 wait:1 all:A0 wait:2 wait:3 step")
    assert judges.growth(two, four) == ["rank 0: 32 bytes in flight become 64 (a.py:1 f)"]
    assert not judges.growth(two, in_turn)


def test_host_synchronisations_are_those_of_the_table():
    found = judges.host_syncs(traces("step sync step sync sync step sync", "step sync step step"))
    assert found == {"a.py f": 2}
    assert judges.more_syncs(found, {"a.py f": 1}) == ["a.py f: 2, not 1"]
    assert not judges.more_syncs(found, {"a.py f": 2, "b.py g": 1})


def test_host_synchronisations_do_not_grow():
    two, four = traces("step sync step"), traces("step sync sync step")
    assert judges.sync_growth(two, four) == ["a.py f: 1 host synchronisations become 2"]
    assert not judges.sync_growth(four, two)


@pytest.mark.parametrize(
    ("row", "share"),
    [
        ("all:A01 mm wait:0", 1),
        ("all:A01 ops wait:0 mm", 0),  # waits at once, with nothing but small operations between
        ("mm all:A01 wait:0 mm", 0),
        ("all:A01 all:A01 wait:0 mm wait:1", 0.5),
        ("all:A01 mm", 1),
        ("all:A01 wait:0 mm wait:0", 0),  # the first wait counts
        ("step all:A01 wait:0 step all:A01 mm wait:1 step", 1),  # of the last step
    ],
)
def test_messages_under_products_are_counted(row, share):
    found = judges.overlaps(traces(f"{row} gloo:A01 all:A0 mm", "mm" if "step" not in row else "step step"))
    assert found == {"a.py f": share}


def test_hosts_that_wait_before_the_last_product_are_found():
    assert judges.blocked(traces("mm sync mm"), "a.py") == ["a.py:1 f"]
    assert not judges.blocked(traces("mm mm sync"), "a.py") and not judges.blocked(traces("mm sync mm"), "b.py")


def test_pairs_of_communicators_in_different_orders_are_listed():
    assert judges.crossing_pairs(traces("all:A01 all:B01", "all:B01 all:A01")) == ["A01 and B01"]
    assert not judges.crossing_pairs(traces("all:A01 all:B01", "all:A01 all:B01"))
    assert not judges.crossing_pairs(traces("all:A01 all:B02", "all:A01", "all:B02"))


def test_a_judgement_has_the_rules_that_were_broken():
    assert judges.judge(traces("all:A01 wait:0 sync", "all:A01 wait:0")) == {}
    assert judges.judge(traces("all:A01=1", "all:A01=2")).keys() == {"disagreements"}
