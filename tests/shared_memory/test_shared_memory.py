"""Ranks of one host exchange the same values through shared memory as through gloo, and detect dead ranks."""

import contextlib
import datetime
import time

import pytest
import torch
import torch.distributed as dist

from lightning_hybrid.shared_memory import sockets as streams
from lightning_hybrid.shared_memory.collectives import SLOT_BYTES, SharedMemory, shared_memory
from lightning_hybrid.shared_memory.transfers import Transfers, start_all_gather, transfers_of

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int16, torch.bool]
LONG = SLOT_BYTES // 4 * 2 + 3  # elements of float32: three rounds


def memory():
    found = shared_memory(dist.group.WORLD)
    assert isinstance(found, SharedMemory)
    return found


def numbers(rank, length, dtype=torch.float32):
    return torch.randn(length, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.world(2)
def test_two_ranks_sum_as_gloo_does():
    for length in (0, 1, 7, LONG):
        local = numbers(dist.get_rank(), length)
        expected = local.clone()
        dist.all_reduce(expected)
        memory().all_reduce(local)
        assert torch.equal(local, expected)


@pytest.mark.world(3)
def test_three_ranks_sum_in_a_fixed_order():
    rows = [numbers(rank, 1000, torch.bfloat16).view(10, 100) for rank in range(3)]
    local = rows[dist.get_rank()].clone()
    memory().all_reduce(local)
    assert torch.equal(local, rows[0] + rows[1] + rows[2])


@pytest.mark.world(3)
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_gather(dtype):
    rows = [numbers(rank, 12, dtype).view(3, 4) for rank in range(3)]
    gathered = memory().all_gather(rows[dist.get_rank()])
    assert all(map(torch.equal, gathered, rows))


@pytest.mark.world(2)
def test_gather_larger_than_a_slot_takes_rounds():
    gathered = memory().all_gather(numbers(dist.get_rank(), LONG))
    assert all(map(torch.equal, gathered, [numbers(0, LONG), numbers(1, LONG)]))


@pytest.mark.world(3)
def test_exchange_of_uneven_lengths():
    """Some pairs exchange nothing, others more than fits into a round."""
    here, lengths = dist.get_rank(), [[0, 5, SLOT_BYTES], [1, 0, 0], [3, SLOT_BYTES // 2, 2]]
    given = [numbers(10 * here + peer, lengths[here][peer]) for peer in range(3)]
    received = memory().exchange(given, [lengths[peer][here] for peer in range(3)])
    for peer, part in enumerate(received):
        assert torch.equal(part, numbers(10 * peer + here, lengths[peer][here]))
    nothing = [torch.empty(0) for _ in range(3)]
    assert [len(part) for part in memory().exchange(nothing, [0, 0, 0])] == [0, 0, 0]


@pytest.mark.world(2)
def test_slot_is_not_overwritten_while_read():
    """One rank always reads the numbers late."""
    channel = memory()
    for step in range(200):
        local = torch.full((1000,), float(step + dist.get_rank()))
        channel.all_reduce(local)
        if step % 20 == dist.get_rank():
            time.sleep(0.002)
        assert local.eq(2.0 * step + 1).all(), step


@pytest.mark.world(2)
def test_group_has_one_memory():
    assert memory() is memory()
    streams.close_peer_sockets(dist.group.WORLD)
    assert shared_memory(dist.group.WORLD) is not None


@pytest.mark.world(2)
def test_ranks_of_two_hosts_share_no_memory():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "_host", lambda: f"host {dist.get_rank()}")
        assert shared_memory(dist.group.WORLD) is None


@pytest.mark.world(2)
def test_all_ranks_fall_back_if_one_cannot():
    def fail(name):
        raise OSError("no such system call")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr("os.memfd_create", fail)
        assert shared_memory(dist.group.WORLD) is None


@contextlib.contextmanager
def peer_is_gone():
    begin = time.perf_counter()
    with pytest.raises(dist.DistNetworkError, match="rank 1 of a group on this host has closed its connections"):
        yield
    assert time.perf_counter() - begin < 30


@pytest.mark.world(2)
def test_closed_rank_is_detected():
    channel = memory()
    channel.all_reduce(torch.ones(1))
    if dist.get_rank() == 1:
        streams.close_peer_sockets(dist.group.WORLD)
        return
    with peer_is_gone():
        channel.all_reduce(torch.ones(1))
    with peer_is_gone():
        channel.all_reduce(torch.ones(1))


@pytest.mark.world(2)
def test_missing_rank_times_out():
    group = dist.new_group(timeout=datetime.timedelta(seconds=0.3))
    channel = shared_memory(group)
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"has waited 0.3 s for rank 1 of it"):
            channel.all_reduce(torch.ones(1))
    dist.barrier()


# --- transfers -------------------------------------------------------------------------------------------------------


def transfers():
    found = transfers_of(dist.group.WORLD)
    assert isinstance(found, Transfers)
    return found


def slots_of(channel):
    return {size: len(places) for size, places in channel._blocks.items()}


@pytest.mark.world(2)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64])
def test_tensors_of_any_dtype_and_shape(dtype):
    channel = transfers()
    shapes = [(), (0,), (3,), (2, 3), (2, 0, 4), (1, 2, 1, 2, 1, 2)]
    tensors = [
        torch.arange(max(1, len(shape) * 8)).to(dtype)[: torch.Size(shape).numel()].view(shape) for shape in shapes
    ]
    if dist.get_rank() == 0:
        for tag, tensor in enumerate(tensors):
            channel.send(1, tag, tensor)
    else:
        for tag in reversed(range(len(tensors))):  # in any order of receiving
            got = channel.receive(0, tag, dtype)
            assert torch.equal(got, tensors[tag]) and got.shape == tensors[tag].shape


@pytest.mark.world(2)
def test_views():
    channel, base = transfers(), torch.arange(12.0).view(3, 4)
    views = [base.t(), base[:, 1:3], base.expand(2, 3, 4), torch.view_as_complex(base.view(6, 2)).conj()]
    for view in views:
        if dist.get_rank() == 0:
            channel.send(1, 0, view)
        else:
            assert torch.equal(channel.receive(0, 0, view.dtype), view)


@pytest.mark.world(3)
def test_message_order_per_tag_and_memory_growth():
    """All ranks send to all others before they receive anything; the tensors may be written at once."""
    channel, here, lengths = transfers(), dist.get_rank(), [10, 2**18 + 1, 2**19, 3]
    others = [peer for peer in range(3) if peer != here]
    for peer in others:
        for number, length in enumerate(lengths):
            sent = torch.full((length,), 100.0 * here + 10 * peer + number)
            channel.send(peer, 5, sent)
            sent.zero_()
    for peer in others:
        for number, length in enumerate(lengths):
            got = channel.receive(peer, 5, torch.float32)
            assert got.shape == (length,) and got.eq(100.0 * peer + 10 * here + number).all()


@pytest.mark.world(2)
def test_slots_are_reused():
    channel, peer = transfers(), 1 - dist.get_rank()
    for step in range(20):
        for length in (900 + step, 5000 + step):
            channel.send(peer, 0, torch.full((length,), float(step)))
        for length in (900 + step, 5000 + step):
            got = channel.receive(peer, 0, torch.float32)
            assert got.shape == (length,) and got.eq(step).all()
    dist.barrier()
    # A slot may be read after the next message is sent, not after the second next.
    assert set(slots_of(channel).values()) <= {1, 2} and len(slots_of(channel)) == 2, slots_of(channel)


@pytest.mark.world(2)
def test_messages_of_a_failed_run_are_not_received_later():
    channel, peer = transfers(), 1 - dist.get_rank()
    channel.send(peer, 0, torch.tensor(1.0))
    channel.generation += 1
    channel.send(peer, 0, torch.tensor(2.0))
    assert channel.receive(peer, 0, torch.float32) == 2
    dist.barrier()


@pytest.mark.world(2)
def test_dead_rank_is_detected_by_receiver_and_sender():
    channel = transfers()
    if dist.get_rank() == 1:
        channel.send(0, 0, torch.tensor(1.0))
        streams.close_peer_sockets(dist.group.WORLD)
        return
    assert channel.receive(1, 0, torch.float32) == 1  # what it had sent still arrives
    with peer_is_gone():
        channel.receive(1, 0, torch.float32)
    with peer_is_gone():
        for _ in range(2):
            channel.send(1, 0, torch.ones(1))


@pytest.mark.world(2)
def test_missing_tensor_times_out():
    channel = transfers_of(dist.new_group(timeout=datetime.timedelta(seconds=0.3)))
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"has waited 0.3 s for rank 1 of it"):
            channel.receive(1, 0, torch.float32)
    dist.barrier()


@pytest.mark.world(3)
@pytest.mark.parametrize("shared", [True, False])
def test_gathered_rows_keep_the_order_of_the_calls(shared):
    here = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        if not shared:
            patch.setattr(streams, "_host", lambda: f"host {here}")
        waits = [start_all_gather(torch.tensor([10.0 * here + number]), dist.group.WORLD) for number in range(2)]
        assert (transfers_of(dist.group.WORLD) is not None) == shared
    for number, wait in enumerate(waits):
        assert [row.tolist() for row in wait()] == [[10.0 * rank + number] for rank in range(3)]


@pytest.mark.world(2)
def test_buffers_from_inference_mode_work_outside():
    """Lightning checks the validation before it trains."""
    for mode in (torch.inference_mode(), contextlib.nullcontext()):
        with mode:
            channel, sums, peer = transfers(), memory(), 1 - dist.get_rank()
            channel.send(peer, 0, torch.ones(3))
            got = channel.receive(peer, 0, torch.float32)
            sums.all_reduce(got)
            assert got.tolist() == [2, 2, 2]
            assert len(sums.all_gather(got)) == 2
    assert not got.is_inference() and got.requires_grad_().sum().requires_grad


@pytest.mark.world(2)
def test_send_never_blocks():
    """More messages than the sockets hold, from both ranks, before either receives one."""
    channel, peer, number = transfers(), 1 - dist.get_rank(), 2000
    for index in range(number):
        channel.send(peer, index, torch.tensor(float(index)))
    for index in range(number):
        assert channel.receive(peer, index, torch.float32) == index


@pytest.mark.world(3)
@pytest.mark.parametrize("place", ["memfd_create", "ftruncate"])
def test_rank_without_memory_blocks_no_other(place):
    def fail(*args):
        raise OSError("no memory")

    begin = time.perf_counter()
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(f"os.{place}", fail)
        assert transfers_of(dist.group.WORLD) is None
    assert time.perf_counter() - begin < 30
