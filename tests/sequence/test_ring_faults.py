"""Possible faults of ring attention, planted one by one: the proof finds each of them."""

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_hybrid.sequence import mode, order, ring
from lightning_hybrid.sequence.order import Block, RingOrder
from lightning_hybrid.tensor.collectives import LinearMap
from lightning_hybrid.tensor.plan import RING
from lightning_hybrid.tensor.proof.proof import proof_of
from lightning_hybrid.tensor.search.unit import plan_unit
from models.tensor_blocks import HEADS, WIDTH, tokens


class Rotary(nn.Module):
    """Causal attention of heads that three ranks do not divide, with an embedding of the positions from outside."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x, rotary):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, HEADS, -1).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q * rotary, k * rotary, v, dropout_p=dropout, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(B, T, C))


class Masked(Rotary):
    """The same with a mask from outside."""

    def forward(self, x, mask):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, HEADS, -1).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.out(y.transpose(1, 2).reshape(B, T, C))


def planned(unit, *inputs, size=1, context=3, sequence_parallel=None):
    args = (tokens(), *inputs)
    options = {"context": context, "sequence_parallel": sequence_parallel}
    plan = plan_unit(unit, args, {}, size, **options)
    assert plan.positions is not None and plan.positions.ring_attention, plan.lines()
    proof = proof_of(unit, args, {}, size, seed=1, context=context, least=2 * size * context)
    assert proof.first_failure(plan) is None
    return plan, proof


@functools.cache
def rotary(**options):
    return planned(Rotary(), torch.randn(10, WIDTH // HEADS, requires_grad=True), **options)


@functools.cache
def masked():
    return planned(Masked(), torch.randn(1, HEADS, 10, 10, requires_grad=True))


@pytest.mark.parametrize("options", [{}, {"size": 2}, {"size": 2, "sequence_parallel": "tensor"}])
def test_the_causal_mask_of_a_block_left_out(monkeypatch, options):
    plan, proof = rotary(**options)
    block = RingOrder.block
    monkeypatch.setattr(RingOrder, "block", lambda *args: block(*args)._replace(is_causal=False))
    assert "output 0" in proof.first_failure(plan)


def test_all_keys_of_later_ranks_seen(monkeypatch):
    plan, proof = rotary()
    block = RingOrder.block

    def all_keys(order, rank, other):
        found = block(order, rank, other)
        return found if rank == other else Block(slice(None), slice(None))

    monkeypatch.setattr(RingOrder, "block", all_keys)
    assert "output 0" in proof.first_failure(plan)


def test_blocks_summed_without_their_weights(monkeypatch):
    plan, proof = rotary()

    def wrong(out, lse, block_out, block_lse):
        out.add_(block_out)

    monkeypatch.setattr(ring, "merge_block", wrong)
    assert "output 0" in proof.first_failure(plan)


def test_log_sum_exp_of_the_first_block_alone(monkeypatch):
    plan, proof = rotary()
    merge = ring.merge_block

    def wrong(out, lse, block_out, block_lse):
        merged = lse.clone()
        merge(out, merged, block_out, block_lse)

    monkeypatch.setattr(ring, "merge_block", wrong)
    assert proof.first_failure(plan) is not None


def test_gradients_of_keys_stay_at_the_wrong_rank(monkeypatch):
    plan, proof = rotary()
    send = ring._Passed.send

    def wrong(passed, current):
        is_last = current == (passed._ranks.rank + 1) % passed._ranks.size
        return None if is_last else send(passed, current)

    monkeypatch.setattr(ring._Passed, "send", wrong)
    assert proof.first_failure(plan) is not None


def test_positions_not_put_back_in_order(monkeypatch):
    plan, proof = rotary()
    monkeypatch.setattr(ring, "from_ring_order", lambda local, order, ranks: local)
    assert proof.first_failure(plan) is not None


def test_queries_in_another_order_than_keys(monkeypatch):
    plan, proof = rotary()
    original = order.to_ring_order

    def reversed_order(local, order, ranks):
        return original(local, order, ranks).flip(-2)

    monkeypatch.setattr(ring, "to_ring_order", reversed_order)
    assert "output 0" in proof.first_failure(plan)


def test_gradient_of_an_embedding_of_local_positions_alone(monkeypatch):
    plan, proof = rotary()

    def ungathered(full, sharding):
        def embed(local):
            out = torch.zeros_like(full)
            start = sum(sharding.lengths[: sharding.ranks.rank])
            out.narrow(sharding.dim, start, sharding.local_length).copy_(local)
            return out

        return LinearMap.apply(full, sharding.local_positions, embed)

    monkeypatch.setattr(mode, "local_positions", ungathered)
    assert "grad of input 1" in proof.first_failure(plan)


def test_first_rows_of_a_mask_on_every_rank(monkeypatch):
    plan, proof = masked()
    monkeypatch.setattr(mode, "local_rows", lambda mask, sharding: mask.narrow(-2, 0, sharding.local_length))
    assert "output 0" in proof.first_failure(plan)


def test_gradient_of_a_mask_missing(monkeypatch):
    plan, proof = masked()
    local_rows = mode.local_rows
    monkeypatch.setattr(mode, "local_rows", lambda mask, sharding: local_rows(mask.detach(), sharding))
    assert "grad of input 1" in proof.first_failure(plan)


@pytest.mark.parametrize("name", ["norm.weight", "qkv.bias", "out.bias"])
def test_unsummed_gradient_of_local_positions(name):
    plan, proof = rotary()
    before = plan.positions.summed_over_context
    assert name in before
    kept = replace(plan.positions, summed_over_context=tuple(other for other in before if other != name))
    assert f"grad of {name}" in proof.first_failure(replace(plan, positions=kept))


def test_local_positions_without_a_ring():
    plan, proof = rotary()
    failure = proof.first_failure(replace(plan, positions=replace(plan.positions, ring_attention=False)))
    assert failure is not None


def test_a_call_that_the_proof_has_not_seen():
    plan, proof = rotary()
    rules = {site: rule for site, rule in plan.rules.items() if site[0] != RING}
    assert "in another call than in the proof of the unit's plan" in proof.first_failure(replace(plan, rules=rules))


class Cross(nn.Module):
    """Attention to itself, then to another sequence with a mask of its keys."""

    def __init__(self):
        super().__init__()
        self.own, self.q, self.kv = (nn.Linear(WIDTH, n * WIDTH) for n in (3, 1, 2))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, memory, mask):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.own(x).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (self.q(x), *self.kv(memory).chunk(2, -1)))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.out(y.transpose(1, 2).flatten(2))


@functools.cache
def cross(size=1):
    return planned(Cross(), tokens(length=14), torch.randn(2, 1, 10, 14, requires_grad=True), size=size)


def test_gradient_of_another_sequence_of_local_queries_alone(monkeypatch):
    plan, proof = cross()
    assert cross(size=2)[0].num_sharded > 0
    monkeypatch.setattr(mode, "enter", lambda tensor, ranks: tensor)
    assert "grad of" in proof.first_failure(plan)


class Plain(nn.Module):
    """Causal attention to positions in the last dim but one, with any dims before."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(-3, -2) for t in self.qkv(x).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(-3, -2).flatten(-2))


class ReadsValues(Plain):
    def forward(self, x):
        return super().forward(x if x.sum() < 1e9 else 2 * x)


@pytest.mark.parametrize("shape", [(1, 10, WIDTH), (10, WIDTH)])
def test_examples_that_are_long_enough(shape):
    """Of a batch of one sample or none, positions are the first size that an example makes small."""
    plan = plan_unit(Plain(), (torch.randn(shape, requires_grad=True),), {}, 1, context=3)
    assert plan.positions is not None and plan.positions.ring_attention, plan.lines()
    assert plan.positions.dim == len(shape) - 2


class ByHand(Rotary):
    def forward(self, x, rotary):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, HEADS, -1).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        y = torch.softmax(q * rotary @ k.mT, -1) @ v
        return x + self.out(y.transpose(1, 2).reshape(B, T, C))


class OwnMask(Rotary):
    """A mask from the number of positions that the code sees."""

    def forward(self, x, rotary):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, HEADS, -1).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        mask = torch.ones(T, T, dtype=torch.bool).tril()
        y = F.scaled_dot_product_attention(q * rotary, k, v, attn_mask=mask)
        return x + self.out(y.transpose(1, 2).reshape(B, T, C))


@pytest.mark.parametrize(
    ("unit", "reason"),
    [
        (nn.TransformerDecoderLayer(WIDTH, HEADS, WIDTH, 0, batch_first=True), "from one sequence to another"),
        (Rotary(dropout=0.1), "ring attention has no dropout of attention weights and dropout_p is 0.1"),
        (ByHand(), "ring attention: output 0"),
        (OwnMask(), "has not the 7 positions of all context ranks"),
    ],
)
def test_units_that_keep_the_full_sequence(unit, reason):
    other = tokens(length=14) if isinstance(unit, nn.TransformerDecoderLayer) else torch.randn(10, WIDTH // HEADS)
    plan = plan_unit(unit, (tokens(), other), {}, 1, context=3)
    assert plan.positions is None and reason in plan.full_sequence_reason


def test_a_unit_that_reads_values_keeps_the_full_sequence():
    plan = plan_unit(ReadsValues(), (tokens(),), {}, 1, context=3)
    assert plan.positions is None and "ring attention: it reads values of tensors" in plan.full_sequence_reason
