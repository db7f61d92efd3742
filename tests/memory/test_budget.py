"""A budget chooses what layers keep: the peak is just under it, results are bitwise equal, the work is the least."""

import re

import pytest
import torch
from torch import nn

from harness.live_storages import LiveStorages
from lightning_hybrid.errors import RecomputeError
from lightning_hybrid.memory.amounts import Budget, parse_budget
from lightning_hybrid.memory.live import LiveBytes
from lightning_hybrid.memory.recompute.budget import BudgetedLayers
from lightning_hybrid.memory.recompute.layers import Recomputation
from lightning_hybrid.memory.recompute.policies import layer_policies
from lightning_hybrid.step.objects.modules import find_layers

CPU = torch.device("cpu")


class Mixed(nn.Module):
    """Products, cheap functions, dropout, an in-place operation."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        h = nn.functional.gelu(self.a(self.norm(x))).mul_(2)
        return x + nn.functional.dropout(self.b(h.sin() * h), 0.1)


class Sums(Mixed):
    """With results that autograd does not save."""

    def forward(self, x):
        for _ in range(8):
            x = x.repeat(1, 4).add(0.1)[:, : x.shape[1]]
        return super().forward(x)


class Trained:
    """Layers that are trained on two microbatches, the second of which begins before the first one's backward."""

    def __init__(self, budget=None, layers=6, rows=256, policy="keep", layer=Mixed):
        torch.manual_seed(1)
        self.model, self.rows = nn.Sequential(*(layer(16) for _ in range(layers))), rows
        found = find_layers({"": self.model})
        self.layers = None
        if budget is None:
            self.recomputation = Recomputation(found, dict.fromkeys(found, policy))
        else:
            self.layers = BudgetedLayers(CPU, lambda before: budget)
            self.recomputation = Recomputation(found, layer_policies("1GB", found), budget=self.layers)

    def step(self, rows=None):
        torch.manual_seed(2)
        generator = torch.Generator().manual_seed(3)
        self.model.zero_grad()
        with self.recomputation.running():
            losses = [
                self.model(torch.randn(rows or self.rows, 16, generator=generator)).sin().mean() for _ in range(2)
            ]
            for loss in losses:
                loss.backward()

    def gradients(self):
        return [p.grad.clone() for p in self.model.parameters()]

    def profiled_step(self, rows=None):
        self.model.zero_grad()
        self.layers.begin_batch(self.model.parameters())
        self.step(rows)
        return self.layers.end_batch(has_stepped=True)

    def peak(self):
        self.model.zero_grad()
        with LiveStorages(counts_most=True) as live:
            views = [p.detach() for p in self.model.parameters()]  # counts the parameters, each once
            self.step()
        assert views
        return live.most


def test_peak_is_under_the_budget_and_results_are_equal():
    plain = Trained()
    highest = plain.peak()
    expected = plain.gradients()
    floor = floor_of(Trained(budget=1000))
    assert floor < 0.5 * highest
    used = set()
    for share in (0.15, 0.5, 0.85):
        budget = int(floor + share * (highest - floor))
        trained = Trained(budget)
        trained.step()
        assert not trained.layers.plans
        assert trained.profiled_step()
        assert all(torch.equal(a, b) for a, b in zip(trained.gradients(), expected, strict=True))
        assert 0.95 * budget <= trained.peak() <= budget
        assert all(torch.equal(a, b) for a, b in zip(trained.gradients(), expected, strict=True))
        assert trained.layers.report.floor == floor
        used.add(tuple(trained.layers.report.kept_share.values()))
    assert len(used) == 3
    generous = Trained(2 * highest)
    generous.profiled_step()
    assert all(plan.keeps_all for plan in generous.layers.plans.values())
    assert generous.peak() == highest


def floor_of(trained):
    with pytest.raises(RecomputeError) as refused:
        trained.profiled_step()
    return int(re.search(r"at least ([\d,]+) bytes", str(refused.value))[1].replace(",", ""))


def test_a_budget_may_be_what_full_recomputation_takes():
    whole, expected = Trained(policy="full", layer=Sums), Trained(layer=Sums)
    lowest = whole.peak()
    expected.step()
    trained = Trained(int(1.01 * lowest), layer=Sums)
    assert trained.profiled_step() and trained.peak() <= 1.01 * lowest
    assert all(torch.equal(a, b) for a, b in zip(trained.gradients(), expected.gradients(), strict=True))
    assert lowest <= floor_of(Trained(lowest // 2, layer=Sums)) <= 1.01 * lowest


def test_a_budget_below_the_floor_names_it():
    trained = Trained(budget=100_000)
    with pytest.raises(RecomputeError, match=r"at least [\d,]+ bytes .* the peak is .* of \.[0-5], ") as refused:
        trained.profiled_step()
    assert "allows 100,000 bytes" in str(refused.value) and "zero_stage=3" in str(refused.value)
    trained.layers.close()


def test_larger_inputs_are_recomputed_until_they_are_profiled():
    """Batches grow: the first one at the floor, then within the budget again."""
    plain = Trained()
    highest = plain.peak()
    trained = Trained(highest)
    trained.profiled_step(rows=128)
    assert all(plan.keeps_all for plan in trained.layers.plans.values()) and not trained.layers.wants_profile
    at_once = trained.peak()
    assert at_once < 0.7 * highest and trained.layers.wants_profile
    trained.profiled_step()
    assert not trained.layers.wants_profile
    assert at_once < trained.peak() <= highest
    trained.step()
    assert not trained.layers.wants_profile
    plain.step()
    assert all(torch.equal(a, b) for a, b in zip(trained.gradients(), plain.gradients(), strict=True))


def test_a_smaller_profiled_batch_does_not_loosen_the_choices():
    """A large batch requests a profile, and the batch that is profiled is small: what is known of others stays."""
    budget = (floor_of(Trained(budget=1000)) + Trained().peak()) // 2
    trained = Trained(budget)
    trained.profiled_step()
    shares = trained.layers.report.kept_share
    trained.step(rows=512)
    assert trained.layers.wants_profile
    trained.profiled_step(rows=16)
    assert trained.peak() <= budget and not trained.layers.wants_profile
    assert trained.layers.report.kept_share == shares


def test_accumulated_batches_make_one_profile():
    """Gradients that stay are part of the peak of the second batch."""
    trained = Trained(10**9)
    assert trained.layers.wants_profile
    trained.layers.begin_batch(trained.model.parameters())
    trained.step()
    assert not trained.layers.end_batch(has_stepped=False)
    trained.layers.begin_batch(trained.model.parameters())
    trained.step()
    trained.layers.begin_optimizer_step()
    assert trained.layers.end_batch(has_stepped=True)
    assert trained.layers.report.num_runs == 2 * 2 * 6


def test_bytes_are_counted_as_they_come_and_go():
    kept = torch.zeros(100)
    with LiveBytes(CPU) as live:
        live.track([kept, kept.view(10, 10)])
        assert live.now == 400
        a = torch.ones(50)
        b = a[:10].view(2, 5)
        del a
        assert live.now == 600
        del b
        assert (live.now, live.begin_interval(), live.peak) == (400, 600, 400)
        torch.ones(5, device="meta")
        c = torch.ones(10).resize_(40)
        assert live.now == 560
        del c
        live.add_constant(7)
        assert live.now == 407


def test_spellings():
    assert parse_budget("6GiB") == Budget(nbytes=6 * 2**30) and parse_budget("1.5 MB") == Budget(nbytes=1_500_000)
    assert parse_budget("50%") == Budget(share=0.5)
    for other in ("6", "0GiB", "0%", "101%", "GiB", "6gib", "-1GB", "full", 0.5, 6, None):
        assert parse_budget(other) is None
