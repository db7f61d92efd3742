"""Stochastic rounding: its neighbours, its expectation, and bits that depend on the element alone."""

import math

import pytest
import torch

from lightning_hybrid.params.placement import Piece, Shard
from lightning_hybrid.params.shards import AxisSharding
from lightning_hybrid.precision.stochastic_rounding import (
    KeyedRounding,
    ParameterNames,
    keyed_bits,
    round_stochastically,
)
from lightning_hybrid.step.standins.absent_tensors import FULL_SHAPE

COUNT = 2**18


def bits_of(key, count=COUNT):
    return keyed_bits(key.ljust(8, b"0"), torch.arange(count, dtype=torch.int32)) & 0xFFFF


@pytest.mark.parametrize("value", [1.001, -3.14159, 1e-3, 123.456, 1e-40, -7.3e37])
def test_expectation_is_the_value(value):
    x = torch.full((COUNT,), value)
    rounded = round_stochastically(x, bits_of(b"mean"))
    assert rounded.dtype is torch.bfloat16
    neighbours = rounded.unique().double()
    assert len(neighbours) == 2 and neighbours[0] < x[0].double() < neighbours[1]
    gap = float(neighbours[1] - neighbours[0])
    share = (float(x[0].double()) - float(neighbours[0])) / gap
    error = (float(rounded.double().mean()) - float(x[0].double())) / gap
    assert abs(error) < 4 * math.sqrt(share * (1 - share) / COUNT)


def test_nearest_rounding_is_biased_where_this_is_not():
    x = torch.full((COUNT,), 1.001)
    assert abs(float(x.bfloat16().double().mean()) - 1.001) > 9e-4
    assert abs(float(round_stochastically(x, bits_of(b"bias")).double().mean()) - 1.001) < 5e-5


def test_values_of_bfloat16_and_non_finite_ones_stay():
    x = torch.tensor([0.0, -0.0, 1.0, -2.5, 3.0e38, float("inf"), -float("inf"), float("nan")]).bfloat16().float()
    x[-1] = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)[0]  # a NaN of which a carry would be -0
    for key in (b"a", b"b", b"c"):
        rounded = round_stochastically(x, bits_of(key, len(x)) | 0x8001)
        torch.testing.assert_close(rounded.float(), x, rtol=0, atol=0, equal_nan=True)


def test_bits_are_uniform_and_independent():
    streams = [bits_of(key) for key in (b"one", b"two", b"three")]
    streams.append(streams[0].roll(1))
    for bits in streams:
        for shift in (0, 4, 8, 12):
            counts = torch.bincount((bits >> shift) & 15, minlength=16).double()
            assert float(((counts - COUNT / 16) ** 2 / (COUNT / 16)).sum()) < 45  # chi-square, 15 degrees: p > 1e-4
    for i, one in enumerate(streams):
        for other in streams[:i]:
            correlation = float(torch.corrcoef(torch.stack([one, other]).double())[0, 1])
            assert abs(correlation) < 4.5 / math.sqrt(COUNT)


class Ranks:
    """Stands for a process group of which only the rank matters."""

    group_name = "ranks"

    def __init__(self, rank, size):
        self._rank, self._size = rank, size

    def rank(self):
        return self._rank

    def size(self):
        return self._size


PLACEMENTS = {
    "rows": [Shard.evenly(0, 12, 2)],
    "uneven columns": [Shard.allowing_empty(1, 5, 2)],
    "fused pieces": [Shard(0, (Piece(4, 2), Piece(4, 2), Piece(4, 1)))],
    "two axes": [Shard(0, (Piece(8, 2), Piece(4, 2))), Shard.allowing_empty(0, 6, 2)],
    "two dims": [Shard.evenly(0, 12, 2), Shard.allowing_empty(1, 5, 2)],
}


@pytest.mark.parametrize("placements", PLACEMENTS.values(), ids=PLACEMENTS)
def test_shards_are_rounded_as_the_full_tensor(placements):
    value = torch.randn(12, 5, 3, generator=torch.Generator().manual_seed(0))
    p = torch.nn.Parameter(value.bfloat16())
    expected = torch.empty_like(value, dtype=torch.bfloat16)
    KeyedRounding({id(p): "p"}, seed=1, step=lambda: 7)(p, expected, value)
    for number in range(2 ** len(placements)):
        ranks = [number >> axis & 1 for axis in range(len(placements))]
        axes = [AxisSharding(Ranks(rank, 2), {"p": each}) for rank, each in zip(ranks, placements, strict=True)]
        local, local_expected = value, expected
        for axis in axes:
            local = axis.shard(local, axis.placements["p"])
            local_expected = axis.shard(local_expected, axis.placements["p"])
        shard = torch.nn.Parameter(local.bfloat16())
        setattr(shard, FULL_SHAPE, value.shape)
        target = torch.empty_like(local, dtype=torch.bfloat16)
        KeyedRounding({id(shard): "p"}, seed=1, step=lambda: 7, shardings=axes)(shard, target, local)
        assert torch.equal(target, local_expected)


def test_bits_change_with_step_seed_and_name():
    value = torch.full((64,), 1.001)
    p = torch.nn.Parameter(value.bfloat16())

    def rounded(name="p", seed=1, step=7):
        target = torch.empty(64, dtype=torch.bfloat16)
        KeyedRounding({id(p): name}, seed=seed, step=lambda: step)(p, target, value)
        return target.tolist()

    assert rounded() == rounded()
    assert len({tuple(rounded(**other)) for other in ({}, {"name": "q"}, {"seed": 2}, {"step": 8})}) == 4


def test_scalar_parameters():
    p = torch.nn.Parameter(torch.tensor(1.0, dtype=torch.bfloat16))
    values = []
    for step in range(64):
        target = torch.empty((), dtype=torch.bfloat16)
        KeyedRounding({id(p): "p"}, step=lambda step=step: step)(p, target, torch.tensor(1.004))
        values.append(float(target))
    assert set(values) == {1.0, 1.0078125}


def test_names_of_parameters_that_are_added_later_or_are_outside_the_module():
    module = torch.nn.Sequential(torch.nn.Linear(2, 2))
    outside = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([*module.parameters(), outside], lr=0.1)
    names = ParameterNames(module, [optimizer])
    assert names[id(module[0].bias)] == "0.bias" and names[id(outside)] == "parameter 2 of optimizer 0"
    module.append(torch.nn.Linear(2, 2))
    optimizer.add_param_group({"params": list(module[1].parameters())})
    assert names[id(module[1].weight)] == "1.weight" and names[id(module[0].bias)] == "0.bias"
    assert names[id(outside)] == "parameter 2 of optimizer 0"
