"""Hooks that a step puts on layers, and modes of torch that it enters by itself."""

import torch
from layouts import each_under
from torch import nn
from torch.nn import functional as F
from wild.bases import Regression
from wild.suite import FEATURES, LAYOUTS, check


class Blocks(Regression):
    """Four layers of a class that each test chooses."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(self.make() for _ in range(4))

    def make(self):
        return nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh())

    def loss(self, batch):
        return F.mse_loss(self(batch[0]), batch[1])


# --- hooks that the step itself puts on layers ------------------------------------------------------------------------


class HooksAtFirst(Blocks):
    """Collects what its layers return, by hooks that the first call puts there."""

    def __init__(self):
        super().__init__()
        self.hooked = False
        self.collected = None

    def collect(self, module, args, output):
        self.collected.append(output)

    def loss(self, batch):
        if not self.hooked:
            for layer in self.layers:
                layer.register_forward_hook(self.collect)
            self.hooked = True
        self.collected = collected = []
        loss = super().loss(batch)
        self.collected = None
        assert len(collected) == 4, len(collected)
        return loss + sum(0.1 * (place + 1) * hidden.square().mean() for place, hidden in enumerate(collected))


# --- modes of torch inside of the step --------------------------------------------------------------------------------


class CountsInInferenceMode(Blocks):
    """Counts are written row by row into a tensor of torch's inference mode."""

    @torch.inference_mode()
    def counts(self, prediction):
        found = torch.zeros(len(prediction), 2)
        for row in range(len(prediction)):
            found[row] = torch.stack([(prediction[row] > 0).sum(), (prediction[row] <= 0).sum()]).to(found.dtype)
        return found

    def training_step(self, batch, batch_idx):
        prediction = self(batch[0])
        self.log("positive", self.counts(prediction.detach())[:, 0].mean())
        return F.mse_loss(prediction, batch[1])


@each_under("module", [HooksAtFirst, CountsInInferenceMode], LAYOUTS[:3])
def test_same_numbers(worlds, module, layout):
    report = check(worlds, module, layout, steps=3)
    assert report.outcome == "same", str(report)
