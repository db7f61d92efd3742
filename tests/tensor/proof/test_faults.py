"""Possible faults of a sharded run, planted one by one: the proof finds each of them, for any weights."""

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_hybrid.params.placement import Replicated, Shard
from lightning_hybrid.sequence import positions
from lightning_hybrid.sequence import positions as sequence_collectives
from lightning_hybrid.tensor.collectives import leave
from lightning_hybrid.tensor.plan import PositionsPlan
from lightning_hybrid.tensor.proof.proof import proof_of
from lightning_hybrid.tensor.runtime import linears as linears
from lightning_hybrid.tensor.runtime.linears import ParallelLinears
from lightning_hybrid.tensor.runtime.products import Product
from lightning_hybrid.tensor.search.unit import plan_unit
from models.tensor_blocks import HEADS, WIDTH, Block, FusedAttention, GroupedQueries, tokens

SHARDED = ["tensor", "context", "both", "all"]


def planned(unit, size=2, sequence_parallel=None):
    """The plan of a unit, and a proof of it that passes; `sequence_parallel` says which ranks shard positions.

    "both": to context ranks, beside tensor ranks. "all": again to these.
    """
    args = (tokens(),)
    size, context = (
        1 if sequence_parallel == "context" else size,
        2 if sequence_parallel in ("context", "both", "all") else 1,
    )
    plan = plan_unit(
        unit,
        args,
        {},
        size,
        context=context,
        sequence_parallel="tensor" if sequence_parallel in ("tensor", "all") else None,
    )
    proof = proof_of(unit, args, {}, size, seed=1, context=context)
    assert proof.first_failure(plan) is None
    return plan, proof


@functools.cache
def fused(sequence_parallel=None):
    return planned(Block(FusedAttention()), sequence_parallel=sequence_parallel)


def test_missing_gradient_sum_at_a_region_input(monkeypatch):
    plan, proof = fused()
    monkeypatch.setattr(linears, "enter", lambda tensor, ranks, readers: tensor)
    assert "relative difference" in proof.first_failure(plan)


def test_unsummed_gradient_of_a_full_norm_on_local_heads():
    plan, proof = planned(GroupedQueries(HEADS, norm=True), size=4)
    assert plan.summed == ("q_norm.weight",) and plan.placements["q_norm.weight"] == Replicated()
    assert "grad of q_norm.weight" in proof.first_failure(replace(plan, summed=()))


@pytest.mark.parametrize("sequence_parallel", SHARDED)
@pytest.mark.parametrize("name", ["ln_1.weight", "attn.c_proj.bias"])
def test_unsummed_gradient_of_local_positions(sequence_parallel, name):
    plan, proof = fused(sequence_parallel)
    for over in ("tensor", "context") if sequence_parallel == "all" else (sequence_parallel,):
        field = "summed_over_tensor" if over == "tensor" else "summed_over_context"
        before = getattr(plan.positions, field)
        assert name in before
        kept = replace(plan.positions, **{field: tuple(other for other in before if other != name)})
        assert f"grad of {name}" in proof.first_failure(replace(plan, positions=kept))


class OtherInEval(nn.Module):
    """Different code in training and in evaluation."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        h = self.up(x)
        return x + self.down(torch.relu(h) if self.training else torch.tanh(h))


def test_weight_gradient_wrong_in_eval_mode_only(monkeypatch):
    call = Product.__call__

    def wrong_in_eval(product, x, with_bias):
        module = product._module
        weight = module.weight
        if module.training or not weight.requires_grad:
            return call(product, x, with_bias)
        doubled = weight * 1.0
        doubled.register_hook(lambda grad: 2 * grad)
        return nn.functional.linear(x, doubled, module.bias if with_bias else None)

    plan, proof = planned(OtherInEval())
    monkeypatch.setattr(Product, "__call__", wrong_in_eval)
    assert "weight in eval mode, with gradients" in proof.first_failure(plan)


class OtherLinesInEval(OtherInEval):
    """The same numbers in both modes, by different code."""

    def forward(self, x):
        h = self.up(x)
        if not self.training:
            return x + self.down(torch.relu(h))
        return x + self.down(torch.relu(h))


class AlwaysEqual(OtherInEval):
    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class WithBatchNorm(AlwaysEqual):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return self.norm(super().forward(x).transpose(1, 2)).transpose(1, 2)


@pytest.mark.parametrize(
    ("kind", "proved"), [(AlwaysEqual, 2), (OtherInEval, 4), (OtherLinesInEval, 4), (WithBatchNorm, 4)]
)
def test_modes_that_run_other_code_are_proved(kind, proved):
    plan, proof = planned(kind())
    before = proof.ranks.num_trials
    assert proof.first_failure(plan) is None
    assert proof.ranks.num_trials - before == proved


@pytest.mark.parametrize("sequence_parallel", [None, "tensor", "all"])
def test_bias_added_by_every_rank(monkeypatch, sequence_parallel):
    plan, proof = fused(sequence_parallel)

    def row(self, linear, run, x, *args, **kwargs):
        sequence = self.sequence
        if sequence.exchanges(linear.fqn):
            x = sequence.to_positions(x, linear.fqn)
        out = run(x, True, *args, **kwargs)
        return sequence.reduce_scatter(out, sequence.inner) if sequence.is_sharded else leave(out, self._ranks)

    monkeypatch.setattr(ParallelLinears, "_row", row)
    assert "output 0" in proof.first_failure(plan)


def test_wrong_fused_projection_shard_with_zero_output_projection():
    """With the user's weights no output and no input gradient would differ."""
    unit = FusedAttention()
    nn.init.zeros_(unit.c_proj.weight)
    nn.init.zeros_(unit.c_proj.bias)
    plan, proof = planned(unit)
    assert len(plan.placements["c_attn.weight"].pieces) == 3
    wrong = {name: Shard.evenly(0, 3 * WIDTH, 2) for name in ("c_attn.weight", "c_attn.bias")}
    assert "relative difference" in proof.first_failure(replace(plan, placements={**plan.placements, **wrong}))


@pytest.mark.parametrize("sequence_parallel", SHARDED)
def test_features_sharded_instead_of_positions(sequence_parallel):
    plan, proof = fused(sequence_parallel)
    assert plan.positions.dim == 1
    assert proof.first_failure(replace(plan, positions=replace(plan.positions, dim=2))) is not None


class Centred(nn.Module):
    """Mixes positions where every rank would have local ones; all shapes fit."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x - x.mean(1, keepdim=True))))


def test_mixed_sharded_positions():
    plan, proof = planned(Centred())
    along = PositionsPlan(by="tensor", leaf_index=0, dim=1, num_dims=3, outputs=(0,), summed_over_tensor=("down.bias",))
    inputs = {"up": (0,)}
    assert "output 0" in proof.first_failure(replace(plan, positions=replace(along, inputs=inputs)))
    assert proof.first_failure(replace(plan, positions=replace(along, inputs=inputs, dim=0))) is None
    found, _ = planned(Centred(), sequence_parallel="tensor")
    assert found.positions is None or found.positions.dim == 0


@pytest.mark.parametrize("sequence_parallel", ["tensor", "all"])
def test_unsummed_positions_of_sums(monkeypatch, sequence_parallel):
    plan, proof = fused(sequence_parallel)
    monkeypatch.setattr(sequence_collectives, "leave", lambda x, of, _: sequence_collectives.local_positions(x, of))
    assert "output 0" in proof.first_failure(plan)


@pytest.mark.parametrize("sequence_parallel", ["tensor", "all"])
def test_ungathered_gradient_of_positions(monkeypatch, sequence_parallel):
    plan, proof = fused(sequence_parallel)

    class CustomGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, local, sharding):
            ctx.sharding = sharding
            return sharding.gathered(local)

        @staticmethod
        def backward(ctx, grad):
            return ctx.sharding.local_positions(grad), None

    monkeypatch.setattr(positions, "enter", CustomGradient.apply)
    assert "grad of" in proof.first_failure(plan)


@pytest.mark.parametrize("sequence_parallel", ["context", "both", "all"])
def test_heads_exchanged_in_a_wrong_order(sequence_parallel):
    plan, proof = fused(sequence_parallel)
    assert list(plan.positions.features) == ["attn.c_attn", "attn.c_proj"]
    ranks = plan.size * plan.context
    features = {**plan.positions.features, "attn.c_attn": Shard.evenly(-1, 3 * WIDTH, ranks)}
    assert proof.first_failure(replace(plan, positions=replace(plan.positions, features=features))) is not None
