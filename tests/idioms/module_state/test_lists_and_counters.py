"""Values that modules store for later: lists stacked at the end of an epoch, counters, and last values."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from harness.layouts import under
from harness.verification import LAYOUTS, check
from models.regression import FEATURES, Regressor, mlp

PP2, DP2, BOTH, INTERLEAVED, *_ = LAYOUTS
# Hooks of a reference of several replicas run only on the first one's module.
one_replica = under([PP2, INTERLEAVED])


class Stores(Regressor):
    def __init__(self):
        super().__init__()
        self.body, self.head = mlp(), nn.Linear(FEATURES, 1)

    def forward(self, x):
        return self.head(self.body(x))


class Lists(Stores):
    """Outputs appended in steps and stacked when the epoch ends, in lists, dicts of lists and lists of dicts."""

    def __init__(self):
        super().__init__()
        self.training_outputs, self.validation_outputs = [], []
        self.by_name = {"prediction": [], "target": []}

    def training_step(self, batch, batch_idx):
        x, y = batch
        hidden = self.body[0](x)
        out = self.head(self.body[3](self.body[2](self.body[1](hidden))))
        loss = F.mse_loss(out, y)
        self.training_outputs.append({"out": out.detach(), "y": y, "hidden": hidden.detach()})
        return loss

    def on_train_epoch_end(self):
        for name in ("out", "y", "hidden"):
            together = torch.cat([output[name] for output in self.training_outputs])
            self.log(f"epoch_{name}", (together * torch.arange(len(together)).unsqueeze(1)).sum())
        self.training_outputs.clear()

    def validation_step(self, batch, batch_idx):
        x, y = batch
        out = self(x)
        self.validation_outputs.append(out)
        self.by_name["prediction"].append(out)
        self.by_name["target"].append(y)

    def on_validation_epoch_end(self):
        out = torch.cat(self.validation_outputs)
        self.log("spread", out.std())
        self.log("correlation", (torch.cat(self.by_name["prediction"]) * torch.cat(self.by_name["target"])).mean())
        self.validation_outputs.clear()
        for kept in self.by_name.values():
            kept.clear()


class Anneals(Stores):
    """A counter of batches and a scalar that shrinks, both moved by a hook."""

    def __init__(self):
        super().__init__()
        self.steps_done, self.beta = 0, 1.0

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("beta", self.beta)
        self.log("seen", float(self.steps_done))
        return loss * (1 + self.beta)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.steps_done += 1
        self.beta = max(0.1, self.beta * 0.5)


class Last(Stores):
    """The last predictions, read in the next hook."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.hidden = self.body[0](x)
        self.last_out = self.head(self.body[3](self.body[2](self.body[1](self.hidden))))
        self.last_loss = F.mse_loss(self.last_out, y)
        return self.last_loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        assert self.last_out.shape == (len(batch[0]), 1)
        self.log("last", (self.last_out.detach().flatten() * torch.arange(len(batch[0]))).sum())
        self.log("hidden", self.hidden.detach().square().sum())
        self.log("last_loss", self.last_loss.detach())


@one_replica
@pytest.mark.parametrize("module", [Lists, Anneals], ids=lambda module: module.__name__)
def test_matches_one_process(worlds, module, layout):
    report = check(worlds, module, layout)
    assert report.outcome == "same", str(report)


@one_replica
def test_rebound_attributes_have_the_full_batch(worlds, layout):
    # The reference runs the batch unsplit: its attribute is that of one process.
    report = check(worlds, Last, layout, num_microbatches=1)
    assert report.outcome == "same", str(report)
