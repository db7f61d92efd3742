"""Objects whose tensors travel beside the pickle."""

import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_hybrid.collectives.objects import _SMALL_BYTES, broadcast_object, gather_on_first

LARGE = _SMALL_BYTES // 8 + 1


def of_rank(rank):
    shared = torch.full((LARGE,), float(rank), dtype=torch.float64)
    return {
        "nested": [nn.Parameter(shared), (shared, {"small": torch.tensor([rank, 7])})],
        "other dtypes": [torch.full((2 * _SMALL_BYTES,), rank == 1), torch.full((_SMALL_BYTES,), rank + 1j)],
        "a view": torch.arange(4 * LARGE, dtype=torch.float64)[::2],
        "text": f"rank {rank}",
    }


def check(got, rank):
    expected = of_rank(rank)
    assert got["text"] == expected["text"]
    parameter, (shared, small) = got["nested"]
    assert isinstance(parameter, nn.Parameter) and torch.equal(parameter, expected["nested"][0])
    assert torch.equal(shared, expected["nested"][1][0]) and small["small"].tolist() == [rank, 7]
    for tensor, other in zip(got["other dtypes"], expected["other dtypes"], strict=True):
        assert tensor.dtype == other.dtype and torch.equal(tensor, other)
    assert torch.equal(got["a view"], expected["a view"])


@pytest.mark.world(2)
def test_gathered_on_the_first_rank():
    rows = gather_on_first(of_rank(dist.get_rank()), dist.group.WORLD)
    assert len(rows) == (2 if dist.get_rank() == 0 else 0)
    for rank, row in enumerate(rows):
        check(row, rank)


@pytest.mark.world(2)
@pytest.mark.parametrize("source", [0, 1])
def test_broadcast(source):
    value = of_rank(dist.get_rank()) if dist.get_rank() == source else None
    check(broadcast_object(value, source=source), source)


@pytest.mark.world(2)
def test_large_tensors_are_not_pickled():
    sizes = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("gather_object", "broadcast_object_list"):
            patch.setattr(dist, name, counting(getattr(dist, name), sizes))
        gather_on_first(of_rank(dist.get_rank()), dist.group.WORLD)
        broadcast_object(of_rank(0))
    assert len(sizes) == 2 and max(sizes) < _SMALL_BYTES


def counting(original, sizes):
    def counted(sent, *args, **kwargs):
        sizes.append(len(pickle.dumps(sent)))
        return original(sent, *args, **kwargs)

    return counted
