"""The rendezvous of ranks asks the store equally often for any number of ranks."""

from datetime import timedelta
from types import SimpleNamespace
from zlib import crc32

import pytest
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerStatus
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_hybrid.collectives.arrivals import store_of_run
from lightning_hybrid.errors import NotOnAllRanks
from lightning_hybrid.layout import ParallelLayout
from lightning_hybrid.mesh import Mesh
from lightning_hybrid.strategies.world import rendezvous
from lightning_hybrid.strategies.world.failures import NoFailures
from lightning_hybrid.strategies.world.rendezvous import Rendezvous, _key

POLLS = 12
MOST = 30  # requests in one poll
TRAINER = SimpleNamespace(training=True, state=SimpleNamespace(status=TrainerStatus.RUNNING))


class CountingStore:
    """The store of a run, which counts requests; `act` runs after so many of them on arrivals."""

    def __init__(self):
        self.store, self.count, self.polls = dist.HashStore(), 0, 0
        self.acts = {}

    def __getattr__(self, name):
        def request(*args):
            self.count += 1
            if name == "add" and args[1] == 0 and args[0].startswith("arrived-call"):
                self.polls += 1
                self.acts.pop(self.polls, lambda: None)()
            return getattr(self.store, name)(*args)

        return request


@pytest.fixture(params=[64, 1024])
def ranks_of(request, monkeypatch):
    """The size of a world, its store, and a function that makes the rendezvous of a rank."""
    size, store = request.param, CountingStore()
    monkeypatch.setattr(rendezvous, "_SECONDS_TO_ASK", 0.0)
    layout = ParallelLayout(pipeline_parallel_size=4, data_shard_size=size // 16, tensor_parallel_size=4)
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    mesh = Mesh.build(layout, "cpu")

    def at(rank):
        mesh_at = SimpleNamespace(layout=layout, rank=rank, groups=mesh.groups)
        asked = store if rank == 0 else store.store
        return Rendezvous(TRAINER, mesh_at, asked, timedelta(seconds=60), NoFailures())

    yield size, store, at, dist.get_process_group_ranks(mesh.group("pp"))
    dist.destroy_process_group()


def arrive(store, ranks, count=1):
    store.store.add(f"arrived-{_key(ranks, compares=True)}", count)


def test_requests_of_a_wait(ranks_of):
    size, store, at, _ = ranks_of
    here, last = at(0), at(size - 1)
    for each in (here, last):
        each.passes()
    arrive(store, range(size), size - 2)
    store.acts[POLLS] = lambda: arrive(store, range(size))
    store.store.add(f"sum-1-{_key(range(size), compares=True)}", (size - 1) * crc32(b"a save"))
    store.count = 0
    here.meet("a save")
    assert store.count < MOST * POLLS


def test_requests_until_a_rank_has_gone_on(ranks_of):
    size, store, at, _ = ranks_of
    here, others = at(0), [at(rank) for rank in range(1, size)]
    for each in (here, *others):
        each.passes()
    store.acts[POLLS] = others[-1].passes
    store.count = 0
    with pytest.raises(NotOnAllRanks, match=f"ranks .{size - 1}. have continued without it"):
        here.meet("a save")
    assert store.count < MOST * POLLS + 3 * size


def test_requests_until_a_rank_waits_elsewhere(ranks_of):
    size, store, at, stages = ranks_of
    here, other = at(0), stages[-1]
    key = _key(stages, compares=False)

    def wait_elsewhere():
        store.store.set(f"waits-{other}", f"{key} 1 a read")
        store.store.add(f"arrived-{key}", 1)

    store.acts[POLLS] = wait_elsewhere
    with pytest.raises(NotOnAllRanks, match=f"ranks .{other}. wait for this one in a read"):
        here.meet("a save")
    assert store.count < MOST * POLLS + 4 * size


@pytest.mark.parametrize("is_done", [True, False])
def test_requests_until_all_of_a_replica_have_tried_to_record(ranks_of, is_done):
    size, store, at, _ = ranks_of
    layout = at(0)._mesh.layout
    replica = [at(rank) for rank in range(1, size) if layout.data_rank(rank) == 0]
    for other in replica:
        other._set_recorded(is_done=is_done and other is replica[-1])
    store.count = 0
    assert at(0).fails_alone() is is_done
    assert store.count < MOST


class CountedStore(dist.Store):
    """A store that counts what the start of process groups asks."""

    count = 0

    def set(self, key, value):
        self.count += 1

    def get(self, key):
        self.count += 1
        return b""

    def add(self, key, number):
        self.count += 1
        return number

    def check(self, keys):
        self.count += 1
        return True

    def wait(self, *args):
        self.count += 1

    def set_timeout(self, timeout):
        pass


@pytest.mark.parametrize("size", [64, 1024])
def test_requests_of_a_start(size):
    layout = ParallelLayout(pipeline_parallel_size=4, data_shard_size=size // 16, tensor_parallel_size=4)
    store = CountedStore()
    dist.init_process_group("fake", rank=0, world_size=size, store=store)
    try:
        mesh = Mesh.build(layout, "cpu")
        for axis in ("pp", "dp_shard", "tp"):
            mesh.dedicated_group(axis, "more messages")
        for name in ("run", "evaluated", "memory-guard"):
            store_of_run(name, 0)
    finally:
        dist.destroy_process_group()
    assert store.count < MOST
