"""Experts that ranks cannot share are refused, proved at full width or on a narrow copy; wide ones in little memory."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_hybrid.experts.parallel import narrow_experts as narrowing
from lightning_hybrid.experts.parallel.adapter_registry import candidate_adapters
from lightning_hybrid.experts.parallel.batched_expert_adapters import BatchedPairs
from lightning_hybrid.experts.parallel.equivalence_proof import ExpertsProof
from lightning_hybrid.experts.parallel.expert_tensor_parallel import possible_widths
from lightning_hybrid.experts.parallel.module_list_experts import ExpertList
from lightning_hybrid.params.placement import Piece, Shard
from models.faulty_experts import FAULTY, FaultyIfWide, FixedFeatures, OddWidth, Pairs, ReadsResults

TESTS = Path(__file__).parents[2]
FULL, NARROW, REAL = (8, 12), (128, 384), (4096, 14336)
WIDTHS = [FULL, NARROW, pytest.param(REAL, marks=pytest.mark.slow)]


def proof_of(monkeypatch, kind, sizes, size=2, tensor_size=1):
    """A proof of a module without weights, which is made on a narrow copy where the module is wide."""
    monkeypatch.setattr(narrowing, "LEAST_NUMEL", 10**6 if sizes == REAL else 10**4)
    with torch.device("meta"):
        module = kind(*sizes)
    width = module.width
    call = (torch.empty(6, width), torch.zeros(6, 2, dtype=torch.int64), torch.empty(6, 2)), {}
    adapter = next(each for each in candidate_adapters(module, call) if each.attributes == ("num",))
    proof = ExpertsProof(module, adapter, call, size, tensor_size)
    return module, adapter, proof


@pytest.mark.parametrize("sizes", WIDTHS, ids=str)
def test_right_experts_are_proved(monkeypatch, sizes):
    module, adapter, proof = proof_of(monkeypatch, Pairs, sizes)
    assert type(adapter) is BatchedPairs
    assert not proof.why_not_equivalent()
    assert not proof.why_full_width
    assert (proof.narrow_copy is None) is (sizes == FULL)
    if proof.narrow_copy is not None:
        assert sum(p.numel() for p in proof.narrow_copy.parameters()) < sum(p.numel() for p in module.parameters()) / 3


@pytest.mark.parametrize("sizes", WIDTHS, ids=str)
@pytest.mark.parametrize("kind", FAULTY)
def test_faulty_experts_are_refused(monkeypatch, sizes, kind):
    _, _, proof = proof_of(monkeypatch, kind, sizes)
    assert "differs by" in proof.why_not_equivalent()
    assert not proof.why_full_width


def rows_of_others(self, module, forward, rows, counts, first):
    return RUN(self, module, forward, rows, counts[::-1], first)


def weights_twice(self, module, forward, rows, counts, first):
    return 2 * RUN(self, module, forward, rows, counts, first)


def no_gradient(self, module, forward, rows, counts, first):
    return RUN(self, module, forward, rows.detach(), counts, first)


RUN = BatchedPairs.compute


@pytest.mark.parametrize("sizes", WIDTHS, ids=str)
@pytest.mark.parametrize("fault", [rows_of_others, weights_twice, no_gradient])
def test_faults_of_ranks_are_refused(monkeypatch, sizes, fault):
    _, _, proof = proof_of(monkeypatch, Pairs, sizes)
    monkeypatch.setattr(BatchedPairs, "compute", fault)
    assert "differs by" in proof.why_not_equivalent()


@pytest.mark.parametrize("sizes", WIDTHS, ids=str)
@pytest.mark.parametrize("size", [1, 2])
def test_wrong_width_is_refused(monkeypatch, sizes, size):
    module, _, proof = proof_of(monkeypatch, Pairs, sizes, size, tensor_size=2)
    right, *_ = possible_widths(module, 2)[0]
    half = right.placements["down"].length // 2
    pieces = Shard(2, (Piece(half, 2), Piece(half, 2)))  # not the features that "up" gives
    wrong = replace(right, placements={**right.placements, "down": pieces})
    assert not proof.why_not_equivalent(right)
    assert "differs by" in proof.why_not_equivalent(wrong)
    assert not proof.why_full_width


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (FaultyIfWide, "call 0 is mean in the full unit"),
        (FixedFeatures, "__getitem__ selects a fixed number of features"),
        (ReadsResults, "DataDependentOutputException"),
        (OddWidth, "no width can be divided"),
    ],
)
def test_experts_whose_copy_runs_another_program_are_proved_at_full_width(monkeypatch, kind, reason):
    _, _, proof = proof_of(monkeypatch, kind, NARROW)
    found = proof.why_not_equivalent()
    assert reason in proof.why_full_width
    assert ("differs by" in found) is (kind is FaultyIfWide)


def test_other_program_of_the_ranks_is_proved_at_full_width(monkeypatch):
    """A shard of the real width takes other lines, and is wrong."""
    module, _, proof = proof_of(monkeypatch, Pairs, NARROW, tensor_size=2)
    right, *_ = possible_widths(module, 2)[0]

    def wrong_if_wide(self, module, forward, rows, counts, first):
        out = RUN(self, module, forward, rows, counts, first)
        return out * 2 if module.up.shape[1] == NARROW[1] // 2 else out

    monkeypatch.setattr(BatchedPairs, "compute", wrong_if_wide)
    assert "differs by" in proof.why_not_equivalent(right)
    assert "mul" in proof.why_full_width


class Block(nn.Module):
    """A block with its router, a shared expert, and experts in a list."""

    def __init__(self, width, hidden):
        super().__init__()
        self.gate, self.norm = nn.Linear(width, 4, bias=False), nn.LayerNorm(width)
        self.experts = nn.ModuleList(self.mlp(width, hidden) for _ in range(4))
        self.shared = self.mlp(width, hidden)

    def mlp(self, width, hidden):
        return nn.Sequential(nn.Linear(width, hidden), nn.SiLU(), nn.Linear(hidden, width))

    def forward(self, hidden):
        tokens = self.norm(hidden).view(-1, hidden.shape[-1])
        weights, which = self.gate(tokens).softmax(-1).topk(2)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            self.add(out, tokens, weights, which == number, expert)
        return (out + self.shared(tokens)).view(hidden.shape)

    def add(self, out, tokens, weights, is_chosen, expert):
        row, place = is_chosen.nonzero(as_tuple=True)
        out.index_add_(0, row, expert(tokens[row]) * weights[row, place, None])


class Masked(Block):
    """The rows are selected by a mask."""

    def add(self, out, tokens, weights, is_chosen, expert):
        mask = is_chosen.any(1)
        out[mask] += expert(tokens[mask]) * (weights * is_chosen).sum(1)[mask][:, None]


class RoutesByResults(Block):
    """An expert gets the rows to which the experts before it have added nothing."""

    def add(self, out, tokens, weights, is_chosen, expert):
        super().add(out, tokens, weights, is_chosen & (out[:, :1] == 0), expert)


def proof_of_list(monkeypatch, kind, sizes):
    monkeypatch.setattr(narrowing, "LEAST_NUMEL", 10**6 if sizes == REAL else 10**4)
    with torch.device("meta"):
        module = kind(*sizes)
    call = (torch.empty(2, 9, sizes[0]),), {}
    [adapter] = candidate_adapters(module, call)
    assert type(adapter) is ExpertList
    return ExpertsProof(module, adapter, call, 2)


@pytest.mark.parametrize("sizes", WIDTHS, ids=str)
@pytest.mark.parametrize("kind", [Block, Masked])
def test_experts_in_a_list_are_proved(monkeypatch, sizes, kind):
    proof = proof_of_list(monkeypatch, kind, sizes)
    assert not proof.why_not_equivalent()
    assert not proof.why_full_width
    assert (proof.narrow_copy is None) is (sizes == FULL)


@pytest.mark.parametrize("sizes", [FULL, NARROW], ids=str)
def test_list_that_routes_by_results_is_refused(monkeypatch, sizes):
    proof = proof_of_list(monkeypatch, RoutesByResults, sizes)
    assert proof.why_not_equivalent()
    assert ("DataDependent" in proof.why_full_width or "Dynamic" in proof.why_full_width) is (sizes == NARROW)
