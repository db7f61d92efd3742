"""Faults planted in the sharded run of a wide layer are found by the proof on its narrow copy."""

import functools
from dataclasses import replace

import pytest
import torch

from lightning_hybrid.params.placement import Piece, Replicated, Shard
from lightning_hybrid.sequence import positions as sequence_collectives
from lightning_hybrid.tensor.collectives import leave
from lightning_hybrid.tensor.proof import narrow as narrowing
from lightning_hybrid.tensor.proof.narrow import narrow_layer
from lightning_hybrid.tensor.runtime import linears as linears
from lightning_hybrid.tensor.runtime.products import Product
from lightning_hybrid.tensor.search.unit import plan_unit
from models.wide_layers import GatedLayer

LLAMA_8B = 4096, 14336, 32, 8
LLAMA_70B = 8192, 28672, 64, 8
SMALL = 512, 1792, 16, 4
WIDTHS = [SMALL, pytest.param(LLAMA_8B, marks=pytest.mark.slow), pytest.param(LLAMA_70B, marks=pytest.mark.slow)]


@functools.cache
def planned(sizes, sequence_parallel=None):
    """A narrow copy of a layer without weights, and the plan of the layer, which the proof on the copy passes."""
    width, hidden, num_heads, num_kv_heads = sizes
    with torch.device("meta"):
        unit = GatedLayer(width, hidden, num_heads=num_heads, num_kv_heads=num_kv_heads, head_norm=True)
    x = torch.randn(1, 16, width, requires_grad=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(narrowing, "LEAST_NUMEL", 0)
        copy = narrow_layer(unit, (x,), {}, 2)
        plan = plan_unit(unit, (x,), {}, 2, sequence_parallel=sequence_parallel)
    assert copy.factor >= 2
    assert not plan.notes
    assert copy.prove_cached(plan) is not None
    return copy, plan


def without_sum(monkeypatch, plan):
    monkeypatch.setattr(linears, "enter", lambda tensor, ranks, readers: tensor)
    return plan


def without_all_reduce(monkeypatch, plan):
    monkeypatch.setattr(Product, "leave", lambda product, ranks, x: product(x, True))
    return plan


def bias_added_by_every_rank(monkeypatch, plan):
    monkeypatch.setattr(Product, "leave", lambda product, ranks, x: leave(product(x, True), ranks))
    return plan


def wrong_slice_of_a_row(monkeypatch, plan):
    """The two halves of each rank's share belong to other ranks' features."""
    length = plan.placements["down.weight"].length
    pieces = (Piece(length // 2, 2), Piece(length // 2, 2))
    return replace(plan, placements={**plan.placements, "down.weight": Shard(1, pieces)})


def wrong_groups_of_key_heads(monkeypatch, plan):
    """Each rank has every second pair of key heads; its query heads read others."""
    length = plan.placements["k_proj.weight"].length
    shard = Shard(0, (Piece(length // 2, 2), Piece(length // 2, 2)))
    return replace(plan, placements={**plan.placements, "k_proj.weight": shard})


def sharded_norm(monkeypatch, plan):
    length = plan.placements["o_proj.weight"].length
    return replace(plan, placements={**plan.placements, "norm.weight": Shard.evenly(0, length, 2)})


def unsummed_gradient_of_a_norm_on_heads(monkeypatch, plan):
    assert plan.summed == ("q_norm.weight",)
    assert plan.placements["q_norm.weight"] == Replicated()
    return replace(plan, summed=())


FAULTS = [
    *(without_sum, without_all_reduce, bias_added_by_every_rank, wrong_slice_of_a_row, wrong_groups_of_key_heads),
    *(sharded_norm, unsummed_gradient_of_a_norm_on_heads),
]


@pytest.mark.parametrize("sizes", WIDTHS, ids=str)
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found(monkeypatch, sizes, fault):
    copy, plan = planned(sizes)
    assert copy.prove_cached(fault(monkeypatch, plan)) is None


def unsummed_gradient_of_local_positions(monkeypatch, plan):
    summed = plan.positions.summed_over_tensor
    assert "norm.weight" in summed
    kept = tuple(name for name in summed if name != "norm.weight")
    return replace(plan, positions=replace(plan.positions, summed_over_tensor=kept))


def unsummed_positions(monkeypatch, plan):
    monkeypatch.setattr(sequence_collectives, "leave", sequence_collectives.local_positions)
    return plan


def sharded_features_instead_of_positions(monkeypatch, plan):
    return replace(plan, positions=replace(plan.positions, dim=2))


OF_SEQUENCES = [unsummed_gradient_of_local_positions, unsummed_positions, sharded_features_instead_of_positions]


@pytest.mark.parametrize("sizes", WIDTHS, ids=str)
@pytest.mark.parametrize("fault", OF_SEQUENCES)
def test_fault_of_sharded_positions_is_found(monkeypatch, sizes, fault):
    copy, plan = planned(sizes, "tensor")
    assert plan.positions is not None
    assert copy.prove_cached(fault(monkeypatch, plan)) is None


MANY = 50.0


class Limited(GatedLayer):
    """Decides by the values of all positions, beyond the numbers of random examples."""

    def forward(self, x):
        return super().forward(torch.where(x.abs().max() > MANY, x / 2, x))


@pytest.mark.parametrize("sizes", WIDTHS, ids=str)
def test_threshold_of_all_positions_keeps_the_full_sequence(monkeypatch, sizes):
    width, hidden, num_heads, num_kv_heads = sizes
    _, without_limit = planned(sizes, "tensor")
    with torch.device("meta"):
        unit = Limited(width, hidden, num_heads=num_heads, num_kv_heads=num_kv_heads, head_norm=True)
    monkeypatch.setattr(narrowing, "LEAST_NUMEL", 0)
    plan = plan_unit(unit, (torch.randn(1, 16, width, requires_grad=True),), {}, 2, sequence_parallel="tensor")
    assert not plan.notes
    assert plan.placements == without_limit.placements
    assert plan.positions is None
    assert without_limit.positions is not None
