"""The guard: all ranks leave a function together, however far each has come when one runs out of memory."""

import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lightning_hybrid.errors import RankOutOfMemory
from lightning_hybrid.layout import ParallelLayout
from lightning_hybrid.mesh import Mesh
from lightning_hybrid.patching import active_patches
from lightning_hybrid.run.execution.guard import MemoryGuard
from lightning_hybrid.shared_memory.collectives import shared_memory
from lightning_hybrid.shared_memory.transfers import start_all_gather, transfers_of

TIMEOUT = timedelta(seconds=20)


def guarded(mesh, any_failed=lambda: False, timeout=TIMEOUT):
    return MemoryGuard(SimpleNamespace(mesh=mesh, timeout=timeout, any_failed=any_failed))


def all_reduce(mesh):
    total = torch.ones(3)
    dist.all_reduce(total, group=mesh.group("world"))
    return total


def in_shared_memory(mesh):
    total = torch.ones(3)
    shared_memory(mesh.group("world")).all_reduce(total)
    return total


def numbers(mesh):
    return start_all_gather(torch.ones(3, dtype=torch.float64), mesh.group("world"))()[mesh.rank - 1]


def message(mesh):
    transfers, size = transfers_of(mesh.group("world")), mesh.layout.world_size
    transfers.send((mesh.rank + 1) % size, 7, torch.full((3,), float(mesh.rank)))
    return transfers.receive((mesh.rank - 1) % size, 7, torch.float32)


def over_a_smaller_group(mesh):
    total = torch.ones(3)
    dist.all_reduce(total, group=mesh.group("tp"))
    return total


CALLS = {
    "all-reduce": all_reduce,
    "shared memory": in_shared_memory,
    "numbers": numbers,
    "message": message,
    "another group": over_a_smaller_group,
}


def run_calls(mesh, guard, calls, failing, at):
    """Run the calls; the failing rank runs out of memory before one of them."""

    def function():
        for index, name in enumerate(calls):
            if mesh.rank == failing and index == at:
                raise torch.OutOfMemoryError("CUDA out of memory")
            CALLS[name](mesh)
        return "done"

    return guard.run(function)


@pytest.mark.world(4)
def test_all_ranks_stop_at_any_collective():
    mesh = Mesh.build(ParallelLayout(data_replicate_size=2, tensor_parallel_size=2), "cpu")
    shared_memory(mesh.group("world")), transfers_of(mesh.group("world"))
    guard, calls = guarded(mesh), list(CALLS)
    assert run_calls(mesh, guard, calls * 2, None, 0) == "done"
    for failing in range(4):
        for at in range(len(calls)):
            order = calls[at:] + calls[:at]
            with pytest.raises(RankOutOfMemory, match=f"rank {failing}, and all ranks have stopped"):
                run_calls(mesh, guard, [*order, *order], failing, failing)
            assert run_calls(mesh, guard, order, None, 0) == "done"  # no message of the failed attempt is left
    assert message(mesh).tolist() == [float((mesh.rank - 1) % 4)] * 3
    assert guard.largest(float(mesh.rank)) == 3.0
    assert not [patch for patch in active_patches() if "collective" in patch.reason]


@pytest.mark.world(2)
def test_a_rank_that_has_ended_learns_of_the_failure():
    mesh = Mesh.build(ParallelLayout(data_replicate_size=2), "cpu")
    guard = guarded(mesh)

    def function():
        if mesh.rank == 1:
            raise MemoryError

    with pytest.raises(RankOutOfMemory, match="rank 1"):
        guard.run(function)


@pytest.mark.world(2)
def test_other_errors_pass_and_are_not_waited_for():
    mesh = Mesh.build(ParallelLayout(data_replicate_size=2), "cpu")
    guard = guarded(mesh, any_failed=lambda: mesh.rank == 1)

    def function():
        if mesh.rank == 0:
            raise ValueError("of the user")
        all_reduce(mesh)

    kind, words = (ValueError, "of the user") if mesh.rank == 0 else (dist.DistNetworkError, "has failed")
    with pytest.raises(kind, match=words):
        guard.run(function)


@pytest.mark.world(2)
def test_a_rank_that_does_not_come_is_named_in_time():
    mesh = Mesh.build(ParallelLayout(data_replicate_size=2), "cpu")
    guard, start = guarded(mesh, timeout=timedelta(seconds=1)), time.monotonic()
    if mesh.rank == 0:
        with pytest.raises(RuntimeError, match="has waited 1 s"):
            guard.run(lambda: all_reduce(mesh))
        assert time.monotonic() - start < 30


def test_one_process():
    guard = guarded(_OneRank())
    assert guard.run(lambda: 5) == 5
    with pytest.raises(RankOutOfMemory, match="CUDA out of memory"):
        guard.run(lambda: (_ for _ in ()).throw(RuntimeError("CUDA out of memory.")))
    with pytest.raises(KeyError):
        guard.run(lambda: {}["none"])


class _OneRank:
    rank, layout, device_mesh = 0, ParallelLayout(), type("mesh", (), {"device_type": "cuda"})
