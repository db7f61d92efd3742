"""A sharded unit has its shards for one forward; draws differ by rank only inside of it."""

import pytest
import torch
from torch import nn

from lightning_hybrid.tensor.region import RankDraws, mark, mark_all, sharded_over, tensors_in
from lightning_hybrid.tensor.runtime.swaps import Swaps, find_attributes, find_slots, put_forwards, put_tensors


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.second.weight = self.first.weight
        self.num_heads = 4

    def forward(self, x):
        return self.second(self.first(x))


def test_shared_parameter_is_replaced_everywhere_and_restored():
    unit = Tied()
    modules, weight = dict(unit.named_modules()), unit.first.weight
    slots = find_slots(modules, ["first.weight"])
    with Swaps() as swaps:
        shard = torch.zeros(1, 2)
        put_tensors(slots, {"first.weight": shard}, swaps)
        assert unit.first._parameters["weight"] is shard and unit.second._parameters["weight"] is shard
    assert unit.first.weight is weight and unit.second.weight is weight


def test_attributes_and_forwards_are_restored_after_an_error():
    unit = Tied()
    modules = dict(unit.named_modules())
    with pytest.raises(ZeroDivisionError), Swaps() as swaps:
        for attribute in find_attributes(modules, {"": {"num_heads": 2}}):
            swaps.put(*attribute)
        put_forwards(modules, {"": None, "first": torch.neg}, swaps)
        assert unit.num_heads == 2 and unit.first(torch.ones(1, 2)).tolist() == [[-1, -1]]
        raise ZeroDivisionError
    assert unit.num_heads == 4 and "forward" not in vars(unit.first) and "forward" not in vars(unit)


def draws_of(rank, count):
    torch.manual_seed(5)
    around, found = RankDraws(rank, torch.device("cpu")), []
    for _ in range(count):
        with around():
            found.append(torch.rand(3))
    return found, torch.rand(3)


def test_ranks_draw_differently_inside_and_equally_outside():
    (first, outside), (second, other_outside) = draws_of(0, 2), draws_of(1, 2)
    assert not torch.equal(first[0], second[0]) and not torch.equal(first[0], first[1])
    torch.manual_seed(5)
    assert torch.equal(outside, other_outside) and torch.equal(outside, torch.rand(3))
    assert torch.equal(draws_of(0, 1)[0][0], first[0])


def test_shard_marks():
    inner, outer = torch.ones(1), torch.ones(2)
    assert sharded_over(mark(outer, 2)) == 2 and sharded_over(inner) == sharded_over(3) == 0
    result = mark_all((inner, [torch.ones(3), "text"]), 4)
    assert [sharded_over(tensor) for tensor in tensors_in(result)] == [4, 4]
