"""Side outputs of modules reach the step around them, from inside units and once, on any stage that uses them."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from harness.one_process_pipeline import assert_same_gradients, pipeline, reference
from lightning_hybrid.step.tracing.asides import give_aside, taking_asides
from models.cases import batch_of
from models.hand_written import WIDTH, Layers


class AddsSideOutput(nn.Module):
    """Deep inside a unit, adds the size of its result as a side output."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.inner(x)
        give_aside({"size": y.square().mean()})
        return torch.tanh(y)  # the point where a second run stops comes after


class WithSideOutputs(Layers):
    again = False

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(AddsSideOutput())) for _ in range(4)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.again else layer(x))
        return self.head(x)

    def loss(self, batch):
        with taking_asides() as taken:
            loss = super().loss(batch)
        assert len(taken) == 4
        return loss + sum(aside["size"] * (number + 1) for number, aside in enumerate(taken))


def make():
    torch.manual_seed(0)
    return WithSideOutputs().double()


def test_unit_side_outputs_reach_the_loss_on_the_last_stage():
    module, batch = make(), batch_of("vectors", range(4))
    expected = reference(module, lambda: module.loss(batch))
    outcome = pipeline(module, lambda: module.loss(batch), 2)
    assert outcome.units == [["layers.0", "layers.1"], ["layers.2", "layers.3", "head"]]
    torch.testing.assert_close(outcome.loss, expected.loss, rtol=1e-12, atol=0)
    assert_same_gradients(outcome.grads, expected.grads)


def test_recomputation_adds_no_side_output():
    module, batch = make(), batch_of("vectors", range(4))
    expected = reference(module, lambda: module.loss(batch))
    module.again = True
    with taking_asides() as taken:
        outcome = reference(module, lambda: module.loss(batch))
    assert not taken
    assert torch.equal(outcome.loss, expected.loss)
    assert_same_gradients(outcome.grads, expected.grads)


def test_nothing_is_collected_outside_a_step():
    make()(torch.zeros(2, WIDTH, dtype=torch.float64))
