"""Plans of wide layers are searched on narrow copies that run the same program, and are those of the layer itself."""

from dataclasses import fields, replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_hybrid.params.placement import Piece, Shard, shard_tensor
from lightning_hybrid.tensor.narrow import narrow_layer as narrowing
from lightning_hybrid.tensor.narrow.narrow_layer import narrow_layer, plan_of_other_width
from lightning_hybrid.tensor.plan.unit_plan import NO_LINEAR
from lightning_hybrid.tensor.requests.plan_requests_by_unit import UnitRequests
from lightning_hybrid.tensor.search import plan_cache
from lightning_hybrid.tensor.search.plan_cache import PlanCache
from lightning_hybrid.tensor.search.search_sharding_of_unit_sequence import NO_SEQUENCE
from lightning_hybrid.tensor.search.unit_search import NOT_SEARCHED, plan_unit
from lightning_hybrid.tensor.trial import sharded_unit_proof
from models.wide_layers import GatedLayer

WIDTH = 128
LAYOUTS = {
    "tensor": {"size": 2},
    "repeated": {"size": 4},  # two key heads
    "sequence": {"size": 2, "sequence_parallel": "tensor"},
    "context": {"size": 1, "context": 2},
    "all": {"size": 2, "context": 2, "sequence_parallel": "tensor"},
}
OF_SEARCH = {"num_trials", "seconds"}


@pytest.fixture(autouse=True)
def small_layers_too(monkeypatch):
    monkeypatch.setattr(narrowing, "LEAST_NUMEL", 0)


def layer():
    return GatedLayer(WIDTH, 3 * WIDTH, num_heads=4, num_kv_heads=2)


def tokens(width=WIDTH):
    return torch.randn(2, 10, width, generator=torch.Generator().manual_seed(0), requires_grad=True)


def searched_at_full_width(monkeypatch, unit, **layout):
    with monkeypatch.context() as patch:
        patch.setattr(narrowing, "LEAST_NUMEL", 10**12)
        return plan_unit(unit, (tokens(),), {}, **layout)


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.slow] if name == "all" else []) for name in LAYOUTS]
)
def test_plan_is_that_of_the_layer_itself(monkeypatch, layout):
    unit, found = layer(), LAYOUTS[layout]
    ranks = found["size"] * found.get("context", 1)
    assert narrow_layer(unit, (tokens(),), {}, ranks).factor > 1
    plan, wanted = plan_unit(unit, (tokens(),), {}, **found), searched_at_full_width(monkeypatch, unit, **found)
    assert plan.groups
    assert plan.positions is not None or len(found) == 1
    for field in fields(plan):
        if field.name not in OF_SEARCH:
            assert getattr(plan, field.name) == getattr(wanted, field.name), field.name


class FixedFeatures(GatedLayer):
    """The first features have another meaning, whatever the width."""

    def forward(self, x):
        return super().forward(torch.cat([x[..., :24].tanh(), x[..., 24:]], -1))


class OtherCodeIfWide(GatedLayer):
    def forward(self, x):
        if x.shape[-1] > 100:
            x = x * 1.0
        return super().forward(x)


class ReadsValues(GatedLayer):
    def forward(self, x):
        return super().forward(x * 2 if x.isnan().any() else x)


class OddWidth(GatedLayer):
    def __init__(self, *_, **options):
        super().__init__(126, 378, num_heads=6, num_kv_heads=2)

    def forward(self, x):
        return super().forward(x[..., :126])


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (FixedFeatures, "__getitem__ selects a fixed number of features"),
        (OtherCodeIfWide, "call 1 is mul in the full unit and rms_norm in the narrow one"),
        (ReadsValues, "it does not run on fake tensors"),
        (OddWidth, "no width can be divided"),
    ],
)
def test_layer_whose_copy_runs_another_program_is_searched_itself(monkeypatch, kind, reason):
    unit = kind(WIDTH, 3 * WIDTH, num_heads=4, num_kv_heads=2)
    found = narrow_layer(unit, (tokens(),), {}, 2)
    assert isinstance(found, str)
    assert reason in found
    plan, wanted = plan_unit(unit, (tokens(),), {}, 2), searched_at_full_width(monkeypatch, unit, size=2)
    assert (plan.groups, plan.placements, plan.calls) == (wanted.groups, wanted.placements, wanted.calls)
    assert plan.notes == (f"searched at full width ({found})",)


@pytest.mark.parametrize("kind", [FixedFeatures, OddWidth])
def test_layer_without_a_copy_is_left_unsharded_where_weights_are_not_to_be_made(kind):
    with torch.device("meta"):
        unit = kind(WIDTH, 3 * WIDTH, num_heads=4, num_kv_heads=2)
    found = narrow_layer(unit, (tokens(),), {}, 2)
    plan = plan_unit(unit, (tokens(),), {}, 2, at_full_width=False)
    assert not plan.num_sharded
    assert not plan.num_trials
    assert set(plan.replicated_reasons.values()) == {f"{NOT_SEARCHED} ({found})"}


def no_search(monkeypatch, unit):
    """Refuses random copies of a unit with its own number of parameters."""
    make, numel = sharded_unit_proof.random_copy, sum(p.numel() for p in unit.parameters())

    def copied(tried, *arguments):
        assert sum(p.numel() for p in tried.parameters()) < numel
        return make(tried, *arguments)

    monkeypatch.setattr(sharded_unit_proof, "random_copy", copied)


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ({"size": 2}, NO_LINEAR),
        ({"size": 2, "sequence_parallel": "tensor"}, NO_LINEAR),
        ({"size": 1, "context": 2}, ""),
    ],
)
def test_table_with_nothing_to_shard_is_not_searched_itself(monkeypatch, layout, reason):
    unit = nn.Embedding(50, WIDTH)
    rows = torch.arange(20).reshape(2, 10)
    rows[0, 0] = 49
    no_search(monkeypatch, unit)
    plan = plan_unit(unit, (rows,), {}, **layout)
    assert not plan.num_sharded
    assert not plan.notes
    assert plan.replicated_reasons["weight"] == (reason or "context ranks hold all parameters")
    assert plan.full_sequence_reason == ("" if reason else NO_SEQUENCE)


def test_layer_of_any_width_is_searched_without_its_weights():
    with torch.device("meta"):
        unit = nn.Sequential(nn.Linear(2**16, 2**18), nn.GELU(), nn.Linear(2**18, 2**16))
    x = torch.empty(4, 2**16, device="meta", requires_grad=True)
    plan = plan_unit(unit, (x,), {}, 8, at_full_width=False)
    assert [str(group).partition(" (")[0] for group in plan.groups] == ["0 -> 2"]
    assert shard_tensor(unit[0].weight, plan.placements["0.weight"], 3, 8).shape == (2**15, 2**16)


class OtherCodeIfShardIsWide(nn.Module):
    """Other lines with equal numbers: only where a rank's share of the features is wide."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 512), nn.Linear(512, 256)

    def forward(self, x):
        h = self.up(x)
        if h.shape[-1] < self.least:
            return x + self.down(torch.relu(h))
        return x + self.down(torch.relu(h))

    least = 150


def test_plan_is_refused_where_the_sharded_programs_differ():
    unit = OtherCodeIfShardIsWide()
    found = narrow_layer(unit, (tokens(256),), {}, 2)
    assert found.unit.up.out_features // 2 < unit.least <= found.unit.up.out_features
    plan = plan_unit(unit, (tokens(256),), {}, 2)
    assert plan.num_sharded
    assert "searched at full width (call" in plan.notes[0]


def test_cached_plan_is_proved_on_the_copy_too(tmp_path, monkeypatch):
    unit, options = layer(), {"keep_replicated": {}, "plan_requests": UnitRequests()}
    first, second = PlanCache(tmp_path), None
    plan = first.find(unit, (tokens(),), {}, 2, **options)
    first.save()

    def refused(*_):
        raise AssertionError("proved at full width")

    monkeypatch.setattr(plan_cache, "prove_cached", refused)
    second = PlanCache(tmp_path)
    read = second.find(unit, (tokens(),), {}, 2, **options)
    assert second.num_read == 1
    assert (read.placements, read.calls, read.rules) == (plan.placements, plan.calls, plan.rules)
    wrong = replace(plan, placements={**plan.placements, "o_proj.weight": Shard.evenly(0, WIDTH, 2)})
    assert narrow_layer(unit, (tokens(),), {}, 2).prove_cached(wrong) is None


def test_plan_of_other_width_scales_pieces_and_comes_back():
    wide, narrow = layer(), GatedLayer(WIDTH // 4, 3 * WIDTH // 4, num_heads=4, num_kv_heads=2)
    plan = plan_unit(narrow, (tokens(WIDTH // 4),), {}, 2, context=2)
    other = plan_of_other_width(plan, narrow, wide)
    assert other.placements["k_proj.weight"].pieces == (Piece(WIDTH // 2, 2),)
    assert other.linears["down"].num_in == 3 * WIDTH
    assert {name: shard.length for name, shard in other.positions.features.items()} == {
        **{"q_proj": WIDTH, "k_proj": WIDTH // 2, "v_proj": WIDTH // 2, "o_proj": WIDTH}
    }
    assert plan_of_other_width(other, wide, narrow) == plan


class Centred(GatedLayer):
    def forward(self, x):
        return super().forward(torch.where(x.abs().max() > 50, x / 2, x))


def test_decision_by_all_positions_keeps_the_full_sequence():
    unit = Centred(WIDTH, 3 * WIDTH, num_heads=4, num_kv_heads=2)
    assert not isinstance(narrow_layer(unit, (tokens(),), {}, 2), str)
    plan = plan_unit(unit, (tokens(),), {}, 2, sequence_parallel="tensor")
    assert plan.positions is None
    assert plan.num_sharded
    assert not plan.notes


class Fused(nn.Module):
    def __init__(self, num_out=3 * WIDTH):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, num_out), nn.Linear(WIDTH, WIDTH)
        self.head_dim = WIDTH // 4

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_fused_projection_in_three_pieces():
    plan = plan_unit(Fused(), (tokens(),), {}, 2)
    assert not plan.notes
    assert plan.placements["qkv.weight"].pieces == (Piece(WIDTH, 2),) * 3
    with pytest.raises(ValueError, match="128 of 384 has no equal share in 100"):
        plan_of_other_width(plan, Fused(), Fused(100))
