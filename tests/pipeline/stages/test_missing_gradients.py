"""Parameters whose results a layer ignores have no gradient, which differs from a zero gradient."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from harness.verification import COMBINED, LAYOUTS, check
from lightning_hybrid.pipeline.stages.plan import MissingGradients
from models.regression import FEATURES, Regressor


class Ignores(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(FEATURES, FEATURES)

    def forward(self, q, k):
        return self.inner(q).tanh()


class Attends(Regressor):
    """Keys that no layer reads; with this cut they cross stages."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.layers = nn.ModuleList(Ignores() for _ in range(4))
        self.head = nn.Linear(FEATURES, 1)

    def forward(self, x):
        q, k = self.q(x), self.k(x)
        for layer in self.layers:
            q = layer(q, k)
        return self.head(q)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=1.0)


class AttendsSometimes(Attends):
    """In some batches the loss reads the keys, of which only the sum matters."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self(x), y)
        if batch_idx % 2:
            loss = loss + self.k(x).square().mean()
        self.log("train_loss", loss)
        return loss


@pytest.mark.parametrize("module", [Attends, AttendsSometimes])
@pytest.mark.parametrize("layout", [*LAYOUTS, COMBINED], ids=lambda layout: layout.name)
def test_optimizer_skips_parameters_without_gradient(worlds, module, layout):
    report = check(worlds, module, layout, steps=4)
    assert report.outcome == "same", str(report)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_missing_gradient_differs_from_any_number(dtype):
    sender, receiver, key, other = MissingGradients(), MissingGradients(), (1, 0, 3), (1, 0, 4)
    leaf = torch.ones(3, dtype=dtype, requires_grad=True)
    assert receiver.received(key, sender.sent(key, leaf)) is None
    for number in (0.0, 1.0, float("nan"), float("inf")):
        leaf.grad = torch.full_like(leaf, number)
        assert receiver.received(other, sender.sent(other, leaf)) is leaf.grad
    sender.is_new = receiver.is_new = False
    assert receiver.received(key, sender.sent(key, leaf)) is leaf.grad
    leaf.grad = None
    assert receiver.received(key, sender.sent(key, leaf)) is None, "it had none before"
    assert torch.equal(receiver.received(other, sender.sent(other, leaf)), torch.zeros_like(leaf)), "it had one"
