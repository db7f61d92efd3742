"""Units of many kinds are sharded without changes to them, and wrong plans are detected."""

import copy
import dataclasses
import json
import pickle

import pytest
import torch
from torch import nn

from lightning_hybrid.equivalence.copy_layers_with_random_weights import random_copy
from lightning_hybrid.params.placement import Piece, Replicated, Shard
from lightning_hybrid.tensor.runtime.tensor_parallel_region_mode import find_positions
from lightning_hybrid.tensor.search.plan_cache import from_json, to_json
from lightning_hybrid.tensor.search.unit_search import plan_unit
from lightning_hybrid.tensor.shard_state.tensor_parallel_random_draws import RankDraws
from lightning_hybrid.tensor.trial.example_inputs import make_example
from lightning_hybrid.tensor.trial.run_unit_trials import Setting, TrialRanks, run_unsharded
from lightning_hybrid.tensor.trial.sharded_unit_proof import Proof
from models.tensor_blocks import BLOCKS, WIDTH, BiasedAttention, Block, FusedAttention, tokens

# name -> what is sharded over 2 ranks: columns -> rows (or what is gathered), in their order
EXPECTED = {
    "fused": ["attn.c_attn -> attn.c_proj", "mlp.0 -> mlp.2"],
    "fused, as many positions as features": ["attn.c_attn -> attn.c_proj", "mlp.0 -> mlp.2"],
    "grouped queries": ["q_proj, k_proj, v_proj -> o_proj", "gate, up -> down"],
    "one key head": ["q_proj, k_proj, v_proj -> o_proj", "gate, up -> down"],
    "norm on heads": ["q_proj, k_proj, v_proj -> o_proj", "gate, up -> down"],
    "bias": ["q, k, v -> o"],
    "own bias": ["q, k, v -> o"],
    "slopes": ["qkv -> out"],
    "merged heads": ["query_key_value -> dense"],
    "interleaved": ["query_key_value -> dense"],
    "offsets": ["qkv_proj -> o_proj"],
    "offsets, one key head": ["qkv_proj -> o_proj"],
    "mlp": ["0 -> 2"],
    "mlp of three": ["0 -> 2", "4 gathered"],
    "fused gate": ["gate_up -> down"],
    "parallel": ["into -> out"],
    "adapted": ["a -> b", "up -> down"],
    "batch norm": ["expand -> project"],
    "group norm": ["expand -> project"],
    "squeeze and excite": ["expand, excite -> squeeze, project"],
    "lone linear before a pair": ["up -> down", "mix gathered"],
    "manual casts": ["up -> down"],
    "convolutions": ["c1 -> c2", "c3 -> head"],
    "transposed": ["0 -> 2"],
    "encoder layer": ["self_attn attention", "linear1 -> linear2"],
    "decoder layer": ["self_attn attention", "multihead_attn attention", "linear1 -> linear2"],
    "attention": ["attn attention"],
    "attention, sequence first": ["attn attention"],
    "cross attention": ["attn attention"],
    "read twice": ["up -> down"],
    "across features": ["up gathered", "down gathered"],
    "tied": ["up -> down"],
    "lone linear": [" gathered"],
}


def shown(plan):
    return [
        ", ".join(group.columns) + (f" -> {', '.join(group.rows)}" if group.rows else f" {group.role}")
        for group in plan.groups
    ]


def proof_of(unit, args, size=2):
    generator = torch.Generator().manual_seed(0)
    twin = random_copy(unit, generator, torch.float64)

    def runs(example):
        try:
            return run_unsharded(twin, example, Setting()) is not None
        except (RuntimeError, ValueError):
            return False

    example = make_example(args, {}, twin, size, runs, generator, torch.float64)
    return Proof(twin, example, TrialRanks(twin, size), torch.float64)


@pytest.mark.parametrize("name", BLOCKS)
def test_unit_is_sharded_and_proved(name):
    torch.manual_seed(0)
    unit, args = BLOCKS[name]()
    plan = plan_unit(unit, args, {}, 2)
    assert shown(plan) == EXPECTED[name], "\n".join(plan.lines())
    assert set(plan.placements) == {fqn for fqn, _ in (*unit.named_parameters(), *unit.named_buffers())}
    assert plan.num_trials <= 20
    assert pickle.loads(pickle.dumps(plan)) == plan == from_json(json.loads(json.dumps(to_json(plan))))


@pytest.mark.parametrize("name", ["fused", "grouped queries", "offsets", "bias", "slopes", "attention", "group norm"])
def test_four_ranks_with_one_head_each(name):
    torch.manual_seed(0)
    unit, args = BLOCKS[name]()
    assert shown(plan_unit(unit, args, {}, 4)) == EXPECTED[name]


def test_key_heads_fewer_than_ranks_are_repeated():
    unit, args = BLOCKS["grouped queries"]()
    plan = plan_unit(unit, args, {}, 4)
    assert plan.placements["k_proj.weight"] == Shard(0, (Piece(WIDTH // 2, 2),))
    assert plan.shared_pieces == ("k_proj.weight", "v_proj.weight")


def test_variant_without_region_mode_is_preferred():
    unit, args = BLOCKS["norm on heads"]()
    plan = plan_unit(unit, args, {}, 2)
    assert not plan.watched and plan.attributes == {"": {"num_heads": 2, "num_kv_heads": 2}}
    assert plan_unit(*BLOCKS["offsets"](), {}, 2).watched


def test_norm_statistics_of_sharded_channels_are_sharded():
    unit, args = BLOCKS["batch norm"]()
    placements = plan_unit(unit, args, {}, 2).placements
    cut = {fqn for fqn, placement in placements.items() if isinstance(placement, Shard)}
    assert {"n1.running_mean", "n2.running_var", "n1.weight", "depthwise.weight", "act.weight"} <= cut
    assert placements["n3.running_mean"] == placements["n1.num_batches_tracked"] == Replicated()


def test_user_objects_are_unchanged():
    torch.manual_seed(0)
    unit, args = BLOCKS["fused"]()
    state, attributes, before = copy.deepcopy(unit.state_dict()), dict(unit.attn.__dict__), torch.get_rng_state()
    plan_unit(unit, args, {}, 2)
    assert all(torch.equal(tensor, state[fqn]) for fqn, tensor in unit.state_dict().items())
    assert unit.attn.__dict__ == attributes and "forward" not in vars(unit)
    assert torch.equal(torch.get_rng_state(), before) and args[0].grad is None


def test_plan_does_not_depend_on_weights():
    unit, args = BLOCKS["across features"]()
    nn.init.zeros_(unit.down.weight)  # any plan would pass on these
    nn.init.zeros_(unit.down.bias)
    assert shown(plan_unit(unit, args, {}, 2)) == EXPECTED["across features"]


def planted(name, fqn, placement, **changes):
    torch.manual_seed(0)
    unit, args = BLOCKS[name]()
    plan = plan_unit(unit, args, {}, 2)
    placements = {**plan.placements, fqn: placement}
    return proof_of(unit, args).first_failure(dataclasses.replace(plan, placements=placements, **changes))


def test_planted_wrong_plans_are_rejected():
    assert "relative difference" in planted("fused gate", "gate_up.weight", Shard.evenly(0, 96, 2))
    assert "relative difference" in planted("slopes", "qkv.weight", Shard.evenly(0, 96, 2))
    assert "size" in planted("mlp", "0.bias", Replicated())
    assert "relative difference" in planted("grouped queries", "o_proj.weight", Shard(1, (Piece(16, 2), Piece(16, 2))))
    assert planted("grouped queries", "o_proj.weight", Shard.evenly(1, WIDTH, 2)) is None


def test_captured_values_per_head_must_be_sliced():
    unit, args = BiasedAttention(), (tokens(),)
    plan = plan_unit(unit, args, {}, 2)
    proof = proof_of(unit, args)
    assert proof.first_failure(plan) is None
    rules = {key: rule for key, rule in plan.rules.items() if key[1] != "side"}
    assert proof.first_failure(dataclasses.replace(plan, rules=rules)) is not None


def test_unit_that_cannot_run_stays_full_with_its_reason():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            raise ValueError("no such input")

    plan = plan_unit(Broken(), (torch.zeros(2, 4),), {}, 2)
    assert plan.num_sharded == 0
    assert plan.lines() == [
        "replicated (a copy of the unit with random weights does not run: no such input): linear.weight, linear.bias"
    ]


def test_indivisible_sizes_stay_full_with_their_reason():
    plan = plan_unit(nn.Sequential(nn.Linear(8, 9), nn.Linear(9, 8)), (torch.randn(2, 8),), {}, 2)
    assert (
        plan.replicated_reasons["0.weight"]
        == "9 output features of 0 and 9 input features of 1 are not a multiple of 2 ranks"
    )
    assert plan.lines()[0].startswith("warning: ")
    odd = plan_unit(nn.MultiheadAttention(12, 3), (tokens(2, 5, 12),) * 3, {}, 2)
    assert odd.replicated_reasons["in_proj_weight"] == "3 heads are not a multiple of 2 ranks"


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
def test_computed_weight_leaves_others_sharded():
    normed = torch.nn.utils.weight_norm(nn.Linear(8, 8))
    unit = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), normed)
    weight = normed.weight
    plan = plan_unit(unit, (torch.randn(2, 8),), {}, 2)
    assert shown(plan) == ["0 -> 2"]
    assert plan.replicated_reasons["3.weight_v"] == "no weight of a linear"
    assert normed.weight is weight


def test_one_rank_needs_no_plan():
    assert plan_unit(nn.Linear(4, 4), (torch.zeros(2, 4),), {}, 1).num_sharded == 0
    with pytest.raises(ValueError, match="tensor_parallel_size=0"):
        plan_unit(nn.Linear(4, 4), (torch.zeros(2, 4),), {}, 0)


def test_examples_without_content():
    unit = FusedAttention().to("meta")
    plan = plan_unit(unit, (torch.empty(2, 64, WIDTH, device="meta", requires_grad=True),), {}, 2)
    assert shown(plan) == ["c_attn -> c_proj"]


@pytest.mark.parametrize("batch, length", [(2, 3), (4, 3), (4, 4)])
def test_causal_mask_of_few_positions_stays_causal(batch, length):
    """With random mask entries, evaluation by the mask and training by `is_causal` would differ."""
    unit = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    keywords = {"src_mask": nn.Transformer.generate_square_subsequent_mask(length), "is_causal": True}
    plan = plan_unit(unit, (torch.randn(batch, length, 8),), keywords, 2)
    assert [group.role for group in plan.groups] == ["attention", "column"], plan.replicated_reasons


def test_positions_are_sharded_over_many_ranks():
    unit = nn.TransformerEncoderLayer(16, 8, 16, batch_first=True)
    plan = plan_unit(unit, (tokens(2, 10, 16),), {}, 1, context=8)
    assert plan.positions is not None, plan.full_sequence_reason


def test_heads_indivisible_by_tensor_times_context_are_not_exchanged():
    plan = plan_unit(Block(FusedAttention()), (tokens(),), {}, 2, context=4)
    assert shown(plan) == EXPECTED["fused"] and plan.positions is None
    wanted = "4 heads of attn.c_attn are not a multiple of 8 ranks (tensor ranks times context ranks)"
    assert plan.full_sequence_reason.startswith(wanted), plan.full_sequence_reason


class Penalised(nn.Module):
    """A full tensor on every rank, beside a sequence: its gradient must not be summed."""

    def __init__(self):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(WIDTH), FusedAttention()
        self.table = nn.Parameter(torch.ones(5, 3))

    def forward(self, x):
        return x + self.attn(self.norm(x)), self.table.square().sum()


@pytest.mark.parametrize("options", [{"size": 2, "sequence_parallel": "tensor"}, {"size": 1, "context": 2}])
def test_wrong_guess_of_summed_values_is_corrected(options):
    plan = plan_unit(Penalised(), (tokens(),), {}, **options)
    assert plan.positions is not None, plan.full_sequence_reason
    summed = {*plan.positions.summed_over_tensor, *plan.positions.summed_over_context}
    assert "norm.weight" in summed and "table" not in summed


class KeyHeads(nn.Module):
    """Grouped queries whose head width equals a number of heads; projections are viewed on one line."""

    def __init__(self, heads, key_heads, reads_attributes):
        super().__init__()
        self.n, self.kv, self.width = heads, key_heads, heads
        self.sizes = (heads, key_heads, heads)
        self.reads_attributes, features = reads_attributes, heads * heads
        self.q, self.o = nn.Linear(features, features), nn.Linear(features, features)
        self.k, self.v = nn.Linear(features, key_heads * heads), nn.Linear(features, key_heads * heads)

    def forward(self, x):
        (b, t, c), (n, kv, w) = x.shape, (self.n, self.kv, self.width) if self.reads_attributes else self.sizes
        q, k, v = self.q(x).view(b, t, n, w), self.k(x).view(b, t, kv, w), self.v(x).view(b, t, kv, w)
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
        times = n // kv if self.reads_attributes else q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
        return x + self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, c))


@pytest.mark.parametrize("reads_attributes", [True, False])
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 2), (8, 2)])
def test_head_width_that_equals_the_number_of_heads(heads, key_heads, reads_attributes):
    unit = KeyHeads(heads, key_heads, reads_attributes)
    plan = plan_unit(unit, (tokens(2, 16, heads**2),), {}, 2, context=2)
    assert shown(plan) == ["q, k, v -> o"] and plan.positions is not None, plan.full_sequence_reason
    assert list(plan.positions.features) == ["q", "k", "v", "o"], plan.lines()  # exchanged for heads


class WithConvolutions(nn.Module):
    """An MLP of convolutions: its features are not in the last dim and cannot be exchanged, nor need they be."""

    def __init__(self):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(WIDTH), FusedAttention()
        self.c1, self.c2 = nn.Conv1d(WIDTH, 48, 1), nn.Conv1d(48, WIDTH, 1)

    def forward(self, x):
        x = x + self.attn(self.norm(x))
        return x + self.c2(torch.relu(self.c1(x.transpose(1, 2)))).transpose(1, 2)


def test_only_regions_that_mix_positions_must_exchange_them():
    plan = plan_unit(WithConvolutions(), (tokens(),), {}, 2, context=2)
    assert plan.positions is not None and list(plan.positions.features) == ["attn.c_attn", "attn.c_proj"]
    assert shown(plan) == ["attn.c_attn -> attn.c_proj", "c1 -> c2"]


@pytest.mark.parametrize(
    "options", [{"size": 1, "context": 2}, {"size": 2, "context": 2, "sequence_parallel": "tensor"}]
)
@pytest.mark.parametrize("name", ["own bias", "norm on heads"])
def test_attention_unit_is_sharded(name, options):
    """One sees the full sequence length; the other reads its own where values in a region have more."""
    torch.manual_seed(0)
    plan = plan_unit(*BLOCKS[name](), {}, **options)
    assert plan.positions is not None, plan.full_sequence_reason
    assert plan.positions.by == ("both" if "sequence_parallel" in options else "context"), plan.lines()
    assert plan.positions.shown == (("",) if name == "own bias" else ())


@pytest.mark.parametrize(
    ("old", "sizes", "same_dims", "wanted"),
    [
        ((2, 11, 32), (2, 6, 4, 8), False, (1, 1)),  # a projection as heads
        ((2, 1, 2, 11, 8), (2, 4, 6, 8), False, (2, 3)),  # repeated key heads, as many as in the full module
        ((2, 1, 1, 11, 8), (2, 1, 2, 6, 8), True, (3, 3)),
        ((6, 11, 32), (6, 6, 32), False, (1, 1)),  # a batch of as many samples
        ((2, 11, 32), (2, 11, 4, 8), False, None),
        ((2, 6, 32), (2, 6, 4, 8), False, None),  # only local positions
    ],
)
def test_position_dimension(old, sizes, same_dims, wanted):
    """Six of eleven positions are local."""
    assert find_positions(old, sizes, (11,), 6, same_dims=same_dims) == wanted


def test_trial_threads_keep_the_generator_state(monkeypatch):
    """One that has its lock and collects garbage waits for the interpreter's; who has that may wait for the former."""

    def refuse(self):
        raise AssertionError("the generator's state is read")

    monkeypatch.setattr(RankDraws, "__call__", refuse)
    plan = plan_unit(Block(FusedAttention()), (tokens(),), {}, 2, context=2)
    assert shown(plan) == EXPECTED["fused"] and plan.positions is not None


class WritesItself(nn.Sequential):
    """A pair of linears, the first of which has weights in a range."""

    def forward(self, x):
        if self.training:
            self[0].weight.data.clamp_(-0.5, 0.5)
        return super().forward(x)


def test_layer_that_writes_its_weights_stays_full():
    unit = WritesItself(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    before = {name: p.detach().clone() for name, p in unit.named_parameters()}
    plan = plan_unit(unit, (torch.randn(2, 8),), {}, 2)
    assert plan.num_sharded == 0
    assert set(plan.replicated_reasons.values()) == {"its forward writes 0.weight, which ranks would do to copies"}
    assert all(torch.equal(p, before[name]) for name, p in unit.named_parameters())


class Scaled(nn.Linear):
    scale = 1.0

    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias) * self.scale


class Masked(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("mask", torch.ones_like(self.weight))

    def forward(self, x):
        return nn.functional.linear(x, self.weight * self.mask, self.bias)


class Quantised(nn.Linear):
    on = False

    def forward(self, x):
        weight = self.weight.round() if self.on else self.weight
        return nn.functional.linear(x, weight, self.bias)


class Clamped(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias).clamp(-1e4, 1e4)


class LinearSubclass(nn.Linear):
    """As in some models: only the product."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(x.dtype), self.bias)


class NamedOtherwise(nn.Linear):
    pass


def patched(*sizes):
    linear = nn.Linear(*sizes)
    linear.forward = lambda x: nn.functional.linear(x, linear.weight, linear.bias)
    return linear


@pytest.mark.parametrize(
    ("kind", "is_shared"),
    [(kind, False) for kind in (Scaled, Masked, Quantised, Clamped, patched)]
    + [(kind, True) for kind in (nn.Linear, LinearSubclass, NamedOtherwise)],
)
def test_code_beyond_a_product_is_not_replaced_by_one(kind, is_shared):
    unit = nn.Sequential(kind(8, 16), nn.GELU(), nn.Linear(16, 8))
    plan = plan_unit(unit, (torch.randn(2, 8),), {}, 2)
    assert ("0" in plan.roles) is is_shared, plan
