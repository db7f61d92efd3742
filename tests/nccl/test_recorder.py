"""What the recorder keeps, and what raises or is reported at a call; each rule by a planted fault."""

import gc
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness.communication_cases import CASES
from harness.nccl import lines
from harness.nccl.recording import recorded
from harness.nccl.trace import Create, Launch, Objects, Ops, Sync, Trace, Violation, Wait, peaks_in_flight, summary
from harness.python_group import Refused
from lightning_hybrid.collectives.agreement import NumberExchange
from lightning_hybrid.collectives.objects import broadcast_object, gather_on_first

# Over tags, and by calls of a group that the package does not make.
NOT_OF_NCCL = {"transfers by tag", "all_reduce of several"}


def kinds(trace, *also):
    return [type(event).__name__ for event in trace.of(Launch, Wait, Sync, *also)]


@pytest.mark.world(2)
def test_launches_waits_and_host_synchronisations_are_recorded():
    with recorded() as trace:
        tensor = torch.ones(3, 2)
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        assert tensor.sum().item() == 12.0
        dist.broadcast(tensor, src=1)
        dist.barrier()
    assert kinds(trace) == ["Launch", "Wait", "Sync", "Launch", "Wait", "Launch", "Wait", "Sync"]
    first, broadcast, barrier = trace.of(Launch)
    assert (first.kind, first.dtype, first.sizes, first.nbytes, first.members) == (
        "allreduce",
        "float32",
        (6,),
        24,
        (0, 1),
    )
    assert (broadcast.root, barrier.kind) == (1, "barrier")
    assert [sync.what for sync in trace.of(Sync)] == ["item", "barrier"]
    assert Trace.from_json(trace.to_json()) == trace


@pytest.mark.parametrize("name", sorted(CASES.keys() - NOT_OF_NCCL))
@pytest.mark.world(2)
def test_operations_find_what_those_of_gloo_find(name):
    expected = CASES[name](dist.group.WORLD, torch.device("cpu"))
    with recorded() as trace:
        found = CASES[name](dist.group.WORLD, torch.device("cpu"))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert not [*trace.of(Violation)]


@pytest.mark.world(2)
def test_pairs_have_communicators_and_gloo_groups_are_of_the_host():
    here = dist.get_rank()
    with recorded() as trace:
        other = dist.new_group([0, 1], backend="gloo")
        tensor = torch.ones(2)
        (dist.send if here == 0 else dist.recv)(tensor, 1 - here)
        dist.all_reduce(tensor, group=other)
    transfer, reduction = trace.of(Launch)
    assert (transfer.comm, transfer.kind) == ("0:0,1 pair", "recv" if here else "send")
    assert reduction.is_host and not transfer.is_host
    assert [event.is_host for event in trace.of(Create)] == [False, True]


# -- rules at a call -------------------------------------------------------------------------------------------------


@pytest.mark.world(2)
def test_outputs_are_poisoned_until_the_wait():
    with recorded():
        floats, numbers = torch.ones(2), torch.ones(2, dtype=torch.int64)
        works = [dist.all_reduce(tensor, async_op=True) for tensor in (floats, numbers)]
        assert math.isnan(float(floats.sum())) and int(numbers[0]) == torch.iinfo(torch.int64).max
        works[1].wait()  # operations of one communicator complete in their order
        assert floats.tolist() == numbers.tolist() == [2, 2]
        works[0].wait()


@pytest.mark.world(2)
def test_a_changed_input_is_reported():
    with recorded() as trace:
        sent, found = torch.ones(2), torch.empty(2, 2)
        work = dist.all_gather_into_tensor(found.view(-1), sent, async_op=True)
        sent.add_(1)
        work.wait()
        assert found.tolist() == [[1.0, 1.0]] * 2
        dist.all_gather_into_tensor(found.view(-1), sent)
        sent.add_(1)
    assert [event.rule for event in trace.of(Violation)] == ["input changed"]


@pytest.mark.world(2)
def test_a_dropped_work_is_reported_and_leaves_poison():
    with recorded() as trace:
        tensor = torch.ones(2)
        dist.all_reduce(tensor, async_op=True)
        gc.collect()
        dist.barrier(dist.new_group([0, 1]))
        assert [event.rule for event in trace.of(Violation)] == ["dropped"]
        assert math.isnan(float(tensor.sum()))


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.world(2)
def test_a_work_is_completed_as_late_as_allowed_or_early(early):
    with recorded(early=early):
        tensor = torch.ones(2)
        work = dist.all_reduce(tensor, async_op=True)
        dist.all_reduce(torch.ones(1))
        assert work.is_completed() == early
        work.wait()
        assert work.is_completed() == early
        tensor.sum().item()
        assert work.is_completed()


@pytest.mark.world(2)
def test_what_nccl_refuses_is_refused():
    with recorded():
        for tensor in (torch.ones(2, dtype=torch.int16), torch.ones(2, 2).t()[:1]):
            with pytest.raises(Refused):
                dist.all_reduce(tensor)


PLANTED = """
def made_on_the_host(tensor):
    return torch.tensor([1.0])

def made_where_another_is(tensor):
    return tensor.new_tensor([1.0])

def event(run, *args, **kwargs):
    return run(*args, **kwargs)
"""


@pytest.mark.world(2)
def test_what_the_package_makes_is_where_its_statement_says(tmp_path):
    path = tmp_path / "planted.py"
    path.write_text(PLANTED)
    code: dict[str, Any] = {"torch": torch}
    exec(compile(PLANTED, str(path), "exec"), code)
    with pytest.MonkeyPatch.context() as patch, recorded() as trace:
        patch.setattr(lines, "_PACKAGE", str(tmp_path))
        dist.all_reduce(code["made_where_another_is"](torch.ones(1)))
        dist.all_reduce(code["event"](torch.zeros, 1, device="cpu"))  # a mode passes on what another code calls
        assert not [*trace.of(Violation)]
        dist.all_reduce(code["made_on_the_host"](torch.ones(1)))
    assert [event.rule for event in trace.of(Violation)] == ["host tensor"]


@pytest.mark.world(2)
def test_a_tensor_of_the_host_is_reported_where_nccl_would_refuse_it():
    device = torch.device("cpu")
    with recorded() as trace:
        made = NumberExchange([1.0], dist.group.WORLD, names=0, batch=0, is_broken=False, device=device)
        made.finish()
        assert not [*trace.of(Violation)]
        text = "rows = torch.tensor([1.0])\ndist.all_reduce(rows)"
        exec(compile(text, PACKAGE, "exec"), {"torch": torch, "dist": dist})
    assert [event.rule for event in trace.of(Violation)] == ["host tensor"]


PACKAGE = NumberExchange.__init__.__code__.co_filename


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("bool(x[0] > 0)", "item"),
        ("float(x.sum())", "item"),
        ("x.tolist()", "tolist"),
        ("x.cpu()", "cpu"),
        ("x.nonzero()", "nonzero"),
        ("x[x > 0]", "index by mask"),
        ("torch.equal(x, x)", "equal"),
        ("torch.unique(x)", "unique"),
        ("x.cpu().tolist(), x.new_zeros(2), x[x.long()]", "cpu"),
    ],
)
@pytest.mark.world(1)
def test_each_way_to_read_the_device_is_a_host_synchronisation(text, what):
    with recorded() as trace:
        exec(compile(text, PACKAGE, "exec"), {"torch": torch, "x": torch.ones(2)})
    [sync] = trace.of(Sync)
    assert sync.what == what and sync.line.startswith("collectives/agreement.py:")
    assert any(event.count for event in trace.of(Ops)) or what == "tolist"


# -- objects ---------------------------------------------------------------------------------------------------------


@pytest.mark.world(2)
def test_a_tensor_of_the_device_among_objects_is_reported():
    sent = {"small": torch.ones(3), "large": torch.ones(1 << 15)}
    with recorded() as trace:
        rows = [None, None]
        dist.all_gather_object(rows, sent)
        assert [event.on_device for event in trace.of(Objects)] == [("float32 (3,)", "float32 (32768,)")]
        gather_on_first(sent, dist.group.WORLD)
        broadcast_object(sent)
    assert [event.on_device for event in trace.of(Objects)][1:] == [(), ()]


# -- what machines read ----------------------------------------------------------------------------------------------


def test_bytes_in_flight_are_those_that_no_wait_has_come_for():
    launches = [Launch(n, "a", (0, 1), "send", "float32", (n,), nbytes=10 * n, line="x") for n in (1, 2, 3)]
    assert peaks_in_flight([launches[0], launches[1], Wait(1), Wait(2), launches[2], Wait(3)]) == {"x": 30}
    assert peaks_in_flight([launches[0], launches[1], launches[2]]) == {"x": 60}


def test_a_summary_is_of_the_last_complete_step():
    events = Trace.from_json(
        '{"rank": 0, "events": [["Mark", {"name": "training"}], ["Sync", {"what": "item", "line": "a.py:1 f"}],'
        ' ["Mark", {"name": "training"}], ["Sync", {"what": "item", "line": "b.py:1 f"}], ["Mark", {"name": "end"}]]}'
    )
    assert summary([events])["host_synchronisations"] == {"a.py:1 f": 1}
