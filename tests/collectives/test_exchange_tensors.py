import pytest
import torch
import torch.distributed as dist

from lightning_hybrid.collectives.tensors import TensorSpec, exchange_tensors


def tensors_of(source, destination):
    """Of several dtypes and shapes, of odd numbers of bytes and of none; not contiguous."""
    fill = 10 * source + destination
    return [
        torch.full((3, source + 1), fill, dtype=torch.bfloat16),
        torch.full((5,), fill % 2, dtype=torch.bool),
        torch.full((2, 3 + destination), fill, dtype=torch.float64).T,
        torch.empty(0, 4),
        torch.full((), fill, dtype=torch.complex64),
    ][: 5 - destination]


@pytest.mark.world(3)
def test_tensors_arrive_in_their_shapes():
    here, group = dist.get_rank(), dist.group.WORLD
    expected = [tensors_of(source, here) for source in range(3)]
    sent = [tensors_of(here, destination) for destination in range(3)]
    arriving = [[TensorSpec(tuple(t.shape), t.dtype) for t in tensors] for tensors in expected]
    received = exchange_tensors(sent, arriving, group)
    assert sent == [[], [], []]
    for got, wanted in zip(received, expected, strict=True):
        assert [t.dtype for t in got] == [t.dtype for t in wanted]
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True)) and len(got) == 5 - here


@pytest.mark.world(2)
def test_a_rank_may_send_nothing():
    received = exchange_tensors([[], []], [[], []], dist.group.WORLD)
    assert received == [[], []]
    here = dist.get_rank()
    sent = [[], []] if here else [[], [torch.arange(3)]]
    [got, _] = exchange_tensors(sent, [[TensorSpec((3,), torch.int64)] if here else [], []], dist.group.WORLD)
    assert [t.tolist() for t in got] == ([[0, 1, 2]] if here else [])
