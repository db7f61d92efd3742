"""Each operation over `gloo_via_host` finds what it finds over gloo."""

import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.distributed import _functional_collectives as functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from harness.communication_cases import CASES, values
from harness.gloo_via_host.group import GlooViaHost
from harness.gloo_via_host.late import NAME, LateCopies, over_the_host, register
from lightning_hybrid.mesh import is_lost_connection

CPU = torch.device("cpu")
NOT_IN_GLOO = {"all_to_all"}


def new_group(ranks=None, name=NAME):
    return dist.new_group(ranks, backend=register(name=name))


@pytest.mark.world(3)
def test_operations_find_what_they_find_over_gloo():
    group = new_group()
    assert isinstance(group, GlooViaHost) and dist.get_backend(group) == NAME
    for name, run in CASES.items():
        expected = run(dist.group.WORLD, CPU) if name not in NOT_IN_GLOO else None
        found = run(group, CPU)
        if expected is not None:
            torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=name)


@pytest.mark.world(3)
def test_operations_that_gloo_lacks():
    group = new_group()
    here, ranks = group.rank(), torch.arange(3)
    mean, integers = torch.tensor([1.0, 2.0]) * here, torch.tensor([2]) * here + 1
    dist.all_reduce(mean, ReduceOp.AVG, group=group)
    dist.all_reduce(integers, ReduceOp.AVG, group=group)
    assert mean.tolist() == [1.0, 2.0] and integers.tolist() == [3]
    row = torch.empty(1)
    dist.reduce_scatter_tensor(row, torch.full((3,), 2.0 * here), ReduceOp.AVG, group=group)
    assert row.tolist() == [2.0]
    for op, expected in ((ReduceOp.SUM, [True, True, False]), (ReduceOp.PRODUCT, [True, False, False])):
        flags = torch.tensor([True, here == 1, False])
        dist.all_reduce(flags, op, group=group)
        assert flags.tolist() == expected
    rows = [torch.empty(3, dtype=torch.bool) for _ in range(3)]
    dist.all_gather(rows, ranks == here, group=group)
    assert torch.equal(torch.stack(rows), torch.eye(3, dtype=torch.bool))
    found = CASES["all_to_all"](group, CPU)
    sent = [torch.arange(9).view(3, 3)[here] % 13 + 20.0 * peer for peer in range(3)]
    assert torch.equal(torch.stack(found), torch.stack(sent))


@pytest.mark.world(3)
def test_subgroups_and_functional_collectives():
    ends = new_group([0, 2])
    if dist.get_rank() != 1:
        tensor = values(ends, CPU)
        expected = 2 * (torch.arange(6.0).view(2, 3)) + 20
        assert torch.equal(functional.wait_tensor(functional.all_reduce(tensor, "sum", ends)), expected)
        dist.all_reduce(tensor, group=ends)
        assert torch.equal(tensor, expected)
    dist.barrier()


@pytest.mark.world(2)
def test_only_receivers_are_written():
    group = new_group()
    tensor = values(group, CPU)
    before = tensor.clone()
    dist.reduce(tensor, group=group, group_dst=0)
    assert torch.equal(tensor, before) is (group.rank() == 1)


class Operations(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.found.append(function)
        return function(*args, **(kwargs or {}))


class Kernels(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.found.append(function)
        return function(*args, **(kwargs or {}))


@pytest.mark.world(2)
def test_modes_autograd_and_versions_notice_nothing():
    group = new_group()
    weight = torch.nn.Parameter(torch.ones(3))
    with Operations() as operations, Kernels() as kernels:
        group.allreduce([weight]).wait()
    assert not operations.found and not kernels.found
    assert weight.tolist() == [2.0] * 3 and weight._version == 0 and weight.requires_grad and weight.is_leaf
    with torch.inference_mode():
        tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [2.0] * 3 and tensor.is_inference()


@pytest.mark.world(2)
def test_tensors_that_nccl_refuses_are_refused():
    group = new_group()
    with pytest.raises(RuntimeError, match="allreduce of a tensor on meta: a group of backend 'gloo_via_host'"):
        dist.all_reduce(torch.ones(2, device="meta"), group=group)
    with pytest.raises(ValueError, match=r"shape \(3, 2\) with strides \(1, 3\): a group communicates contiguous"):
        dist.all_reduce(torch.ones(2, 3).t(), group=group)


@pytest.mark.world(2)
def test_errors_of_gloo_are_raised_by_wait():
    group = new_group()
    work = dist.all_reduce(torch.ones(2, dtype=torch.int16), group=group, async_op=True)
    with pytest.raises(RuntimeError, match="scalar type"):
        work.wait()
    assert work.is_completed() and isinstance(work.exception(), RuntimeError)


@pytest.mark.world(2)
def test_abort_wakes_the_other_rank():
    group = new_group()
    dist.all_reduce(torch.ones(1), group=group)
    if group.rank() == 1:
        group.abort()
    else:
        with pytest.raises(RuntimeError) as caught:
            dist.all_reduce(torch.ones(1), group=group)
        assert is_lost_connection(caught.value)
    dist.barrier()


@pytest.mark.world(2)
def test_world_of_the_backend():
    with over_the_host():
        expected = CASES["objects"](dist.group.WORLD, CPU)
        assert expected[0][1] == {"rank": 1, "list": [1] * 4}


@pytest.mark.world(2)
def test_streams_are_ordered():
    """The current stream writes the input late, and reads the output once the copy from the host has arrived."""
    copies = LateCopies()
    group = dist.new_group(backend=register(lambda device: copies, "late"))
    stream, here = copies.current, group.rank()
    tensor, read = torch.zeros(3), torch.zeros(3)
    for step in range(3):
        stream.enqueue(lambda step=step: tensor.fill_(10.0 * step + here))
        work = dist.all_reduce(tensor, group=group, async_op=True)
        work.wait()
        stream.enqueue(lambda: read.copy_(tensor))
        stream.synchronize()
        assert read.tolist() == [20.0 * step + 1] * 3
        assert work.is_completed()
    stream.enqueue(lambda: tensor.fill_(5.0 + here))
    if here == 0:
        group.send([tensor], 1, 3).wait()
    else:
        group.recv([read], 0, 3).wait()
        stream.enqueue(lambda: tensor.copy_(read))
        stream.synchronize()
        assert tensor.tolist() == [5.0] * 3
    dist.barrier()


@pytest.mark.world(2)
def test_completion_is_found_without_wait():
    copies = LateCopies()
    group = dist.new_group(backend=register(lambda device: copies, "late to complete"))
    tensor = torch.full((4,), 3.0)
    if group.rank() == 0:
        dist.barrier()
    work = dist.broadcast(tensor, group=group, group_src=0, async_op=True)
    if group.rank() == 1:
        tensor.zero_()
        assert not work.is_completed()
        dist.barrier()
    while not work.is_completed():
        time.sleep(0.001)
    assert tensor.tolist() == [3.0] * 4
    dist.barrier()
