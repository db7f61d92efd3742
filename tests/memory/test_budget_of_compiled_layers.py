"""A budget of compiled layers: those that are recomputed in full, and the peak of what compiled code allocates."""

import pytest
import torch
from torch import nn

from lightning_hybrid.callbacks.monitors.holders import PeakMeter
from lightning_hybrid.errors import RecomputeError
from lightning_hybrid.memory.recompute.budget import BudgetedLayers
from lightning_hybrid.memory.recompute.layers import Recomputation
from lightning_hybrid.memory.recompute.policies import layer_policies
from lightning_hybrid.patching import replaced_forwards
from lightning_hybrid.step.objects.modules import find_layers

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler reads the gradients of inputs of layers


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.b(nn.functional.gelu(self.a(self.norm(x))))


class Wide(Block):
    """With more work and more bytes than the others."""

    def forward(self, x):
        return x + self.b(self.b(nn.functional.gelu(self.a(self.norm(x)))).repeat(1, 4).sin())


class Worked(Block):
    """With more work than the others, and no more bytes."""

    def forward(self, x):
        with torch.no_grad():
            more = self.b(self.a(self.b(self.a(x)))).sum()
        return super().forward(x) + more


class Trained:
    """Compiled layers, trained on two microbatches, the second of which begins before the first one's backward."""

    def __init__(self, policy, rows=512, kinds=(Block, Block, Wide, Block, Block, Block)):
        torch.manual_seed(1)
        self.model, self.rows = nn.Sequential(*(kind(16) for kind in kinds)), rows
        self.found = find_layers({"": self.model})
        self.forwards = {fqn: torch.compile(layer.forward, backend="aot_eager") for fqn, layer in self.found.items()}
        self.layers = BudgetedLayers(CPU, lambda before: policy, in_full=True) if isinstance(policy, int) else None
        policies = layer_policies("1GB" if self.layers else policy, self.found)
        self.recomputation = Recomputation(self.found, policies, budget=self.layers)

    def step(self, rows=None):
        generator = torch.Generator().manual_seed(3)
        self.model.zero_grad()
        with (
            replaced_forwards(self.found, lambda fqn, _: self.forwards[fqn], reason="compiles"),
            self.recomputation.running(),
        ):
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

    def peak(self, rows=None):
        self.step(rows)  # compiles
        self.model.zero_grad()
        meter = PeakMeter(CPU)
        meter.start()
        self.step(rows)
        return meter.stop(sum(p.nbytes for p in self.model.parameters()))

    @property
    def kept(self):
        return [fqn for fqn, share in self.layers.report.kept_share.items() if share == 1]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=64):
        yield


def test_peak_is_under_the_budget_and_results_are_equal():
    plain = Trained("keep")
    highest, floor = plain.peak(), Trained("full").peak()
    expected = plain.gradients()
    assert floor < 0.5 * highest
    largest = 0
    for share in (0.25, 0.6):
        budget = int(floor + share * (highest - floor))
        trained = Trained(budget)
        trained.step()
        assert trained.profiled_step()
        assert all(torch.equal(a, b) for a, b in zip(trained.gradients(), expected, strict=True))
        peak = trained.peak()
        # A layer is the least that can be added.
        assert budget - (highest - floor) / 3 <= peak <= 1.01 * budget
        # The profile repeats a forward to its end, a run up to the last operation that saves something.
        assert floor <= 1.01 * trained.layers.report.floor <= 1.1 * floor
        assert all(torch.equal(a, b) for a, b in zip(trained.gradients(), expected, strict=True))
        assert largest < len(trained.kept) < 6
        largest = len(trained.kept)
    trained = Trained(2 * highest)
    trained.profiled_step()
    assert len(trained.kept) == 6 and trained.peak() == pytest.approx(highest, rel=0.01)


def test_a_budget_below_the_floor_names_it():
    trained = Trained(50_000)
    with pytest.raises(RecomputeError, match=r"allows 50,000 bytes .* the peak is in the backward of \.2"):
        trained.profiled_step()
    trained.layers.close()


def test_the_work_that_is_saved_decides():
    """Of layers with equal bytes that of more work is kept."""
    kinds = Block, Worked, Block
    one = Trained({".1": "keep", ".[02]": "full"}, kinds=kinds).peak()
    trained = Trained(int(1.02 * one), kinds=kinds)
    trained.profiled_step()
    assert trained.kept == [".1"]
    assert one < trained.peak() * 1.02 and Trained("full", kinds=kinds).peak() < 0.9 * one


def test_larger_inputs_are_recomputed_until_they_are_profiled():
    highest = Trained("keep").peak()
    trained = Trained(highest + 100_000)
    trained.profiled_step(rows=256)
    assert len(trained.kept) == 6 and not trained.layers.wants_profile
    at_once = trained.peak()
    assert at_once < 0.7 * highest and trained.layers.wants_profile
    trained.profiled_step()
    assert at_once < trained.peak() <= highest + 100_000 and not trained.layers.wants_profile


def test_a_smaller_profiled_batch_does_not_loosen_the_choices():
    highest, floor = Trained("keep").peak(), Trained("full").peak()
    trained = Trained((highest + floor) // 2)
    trained.profiled_step()
    kept = trained.kept
    trained.step(rows=1024)
    assert trained.layers.wants_profile
    trained.profiled_step(rows=16)
    assert not trained.layers.wants_profile and trained.kept == kept
    assert trained.peak() <= 1.01 * (highest + floor) // 2


def test_the_budget_of_the_compiler():
    """Torch's own knob, which the page on recomputation names: less is saved, and gradients are equal."""
    plain = Trained("keep")
    highest = plain.peak()
    torch._dynamo.reset()
    with torch._functorch.config.patch(activation_memory_budget=0.3):
        saving = Trained("keep")
        assert saving.peak() < 0.8 * highest
    for ours, expected in zip(saving.gradients(), plain.gradients(), strict=True):
        torch.testing.assert_close(ours, expected)
