"""Numbers and tensors of the model that control a later operation or batch."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from harness.verification import STAGES, all_layouts, check
from models.regression import FEATURES, Regressor, mlp


class Scaled(Regressor):
    """A number read from an early layer scales a later one, and the loss is divided by a number read from itself."""

    def __init__(self):
        super().__init__()
        self.body, self.head = mlp(), nn.Linear(FEATURES, 1)

    def forward(self, x):
        hidden = self.body[0](x)
        scale = 2.0 / (1.0 + hidden.detach().abs().mean().item())
        for layer in self.body[1:]:
            hidden = layer(hidden) * scale
        return self.head(hidden)

    def shared_step(self, batch):
        loss = super().shared_step(batch)
        return loss / max(1.0, 2.0) + loss * 0.1 * float(loss.detach())


class FeedsBack(Regressor):
    """The last layer's output of one batch enters the first layer in the next."""

    def __init__(self):
        super().__init__()
        self.body, self.head = mlp(), nn.Linear(FEATURES, 1)
        self.memory = None

    def training_step(self, batch, batch_idx):
        x, y = batch
        memory = torch.zeros_like(y) if self.memory is None else self.memory
        out = self.head(self.body(x + memory))
        self.memory = out.detach()
        return F.mse_loss(out, y)

    def validation_step(self, batch, batch_idx):
        pass


class Measures(nn.Module):
    """Returns a number read from its output, and stores another."""

    def __init__(self):
        super().__init__()
        self.linear, self.spread = nn.Linear(FEATURES, FEATURES), 0.0

    def forward(self, x):
        h = self.linear(x)
        self.spread = float(h.detach().square().mean())
        return h, h.abs().mean().item()


class Logs(Regressor):
    """Code around the layer logs its number."""

    def __init__(self):
        super().__init__()
        self.measures, self.body, self.head = Measures(), mlp(), nn.Linear(FEATURES, 1)

    def forward(self, x):
        h, size = self.measures(x)
        self.size = size
        return self.head(self.body(self.used(h, size)))

    def used(self, h, size):
        if self.training:
            self.log("size", size)
        return h

    def on_train_batch_end(self, *_):
        self.log("sizes", self.size + self.measures.spread)


class Multiplies(Logs):
    def used(self, h, size):
        return h * (1 + size)


class Decides(Logs):
    def used(self, h, size):
        return 2 * h if size > 0.3 else h


class DecidesByAttribute(Logs):
    def used(self, h, size):
        return 2 * h if self.measures.spread > 0.3 else h


@pytest.mark.parametrize("module", [Logs, Multiplies, Decides, DecidesByAttribute])
@pytest.mark.parametrize("count", [1, 2])
def test_numbers_returned_by_layers(worlds, module, count):
    report = check(worlds, module, STAGES, steps=3, num_microbatches=count)
    assert report.outcome == "same", str(report)
    assert ("sharded instead of" in str(report)) == (module in (Decides, DecidesByAttribute)), str(report)


@all_layouts
def test_numbers_are_read_and_used(worlds, layout):
    report = check(worlds, Scaled, layout, steps=2)
    assert report.outcome == "same", str(report)


def test_memory_of_later_stages(worlds):
    for count in (1, 2):  # two microbatches would need it earlier, so that there is one
        report = check(worlds, FeedsBack, STAGES, steps=2, num_microbatches=count)
        assert report.outcome == "same", str(report)
