"""Buffers that the step writes from values of the model and reads elsewhere."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from harness.layouts import each_under, under
from harness.verification import COMBINED, LAYOUTS, STAGES, check
from lightning_hybrid.verify import Layout
from models.regression import FEATURES, Regression, Regressor, mlp


class Quantised(Regression):
    """The codebook of a VQ-VAE, which follows the codes by moving averages."""

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.cos(torch.arange(8.0 * FEATURES)).view(8, FEATURES))
        self.register_buffer("counts", torch.ones(8))
        self.register_buffer("sums", self.codes.clone())

    def loss(self, batch):
        x, y = batch
        z = self.layers[1](self.layers[0](x))
        nearest = torch.cdist(z, self.codes).argmin(1)
        chosen = F.one_hot(nearest, 8).to(z.dtype)
        if self.training:
            with torch.no_grad():
                self.counts.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
                self.sums.mul_(0.9).add_(chosen.t() @ z, alpha=0.1)
                self.codes.copy_(self.sums / (self.counts[:, None] + 1e-5))
        quantised = F.embedding(nearest, self.codes)
        out = self.head(self.layers[3](self.layers[2](z + (quantised - z).detach())))
        return F.mse_loss(out, y) + 0.25 * F.mse_loss(z, quantised)


class Centred(Regression):
    """The input of an early layer is centred by a moving average of the last one's output."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(FEATURES))

    def forward(self, x):
        out = self.layers[0](x) - self.mean
        for layer in self.layers[1:]:
            out = layer(out)
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.5).add_(out.mean(0), alpha=0.5)
        return self.head(out)


class Rebound(Regression):
    """Writes buffers without a new version in torch: from the batch, and from the model."""

    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.zeros(FEATURES))
        self.register_buffer("scale", torch.ones(()))

    def loss(self, batch):
        x, y = batch
        if self.training:
            self.shift.data = 0.5 * self.shift + 0.5 * x.mean(0)
        loss = F.mse_loss(self(x - self.shift), y) / self.scale
        if self.training:
            self.scale.data = 0.9 * self.scale + 0.1 * loss.detach()
        return loss


class Aliased(Regression):
    """Writes buffers by other names, which torch does not call views."""

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(FEATURES))
        self.register_buffer("spread", torch.ones(FEATURES))

    def loss(self, batch):
        x, y = batch
        for layer in self.layers:
            x = layer(x)
        if self.training:
            self.center.data.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            self.spread.detach().copy_(1 + x.detach().std(0))
        return F.mse_loss(self.head((x - self.center) / self.spread), y)


class InPart(Regression):
    """Writes some rows of a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("means", torch.zeros(3, FEATURES))

    def loss(self, batch):
        x, y = batch
        for layer in self.layers:
            x = layer(x)
        if self.training:
            self.means.data[0] = x.detach().mean(0)
            with torch.no_grad():
                self.means[1].mul_(0.9).add_(x[0])
        return F.mse_loss(self.head(x - self.means.mean(0)), y)


class WritesThroughData(Regression):
    """Writes the model's values into its own tensor under another name."""

    def loss(self, batch):
        x, y = batch
        out = self(x)
        sums = torch.zeros_like(out)
        sums.data.add_(out.detach())
        return F.mse_loss(out - sums.mean(), y)


class Hooked(Regression):
    """A hook on each value between two layers, of which some are sent from stage to stage."""

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            if x.requires_grad:
                x.register_hook(lambda gradient: 1.5 * gradient)
        return self.head(x)


class BoundAnew(Regression):
    """The moving center of DINO's teacher: a buffer that is another tensor after each step."""

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(FEATURES))

    def loss(self, batch):
        x, y = batch
        out = x
        for layer in self.layers:
            out = layer(out)
        out, mean = out - self.center, out.detach().mean(0)
        if self.training:
            self.center = self.center * 0.9 + mean * 0.1
        return F.mse_loss(self.head(out), y)


class Packed(Regression):
    """Sequences that are padded to the longest of the batch, inside a layer."""

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cells = nn.GRU(1, FEATURES, batch_first=True)

        def forward(self, x, lengths):
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return pad_packed_sequence(self.cells(packed)[0], batch_first=True)[0]

    def __init__(self):
        super().__init__()
        self.recurrent = Packed.Recurrent()

    def loss(self, batch):
        x, y = batch
        lengths = 1 + (x[:, 0].abs() * (FEATURES - 2)).long().cpu()
        h = self.recurrent(x[..., None], lengths)
        for layer in self.layers:
            h = layer(h)
        return F.mse_loss(self.head(h).mean(1), y)


@under([Layout("zero 1", devices=2, strategy={"zero_stage": 1})])
def test_data_dependent_sizes_used_on_one_stage(worlds, layout):
    report = check(worlds, Packed, layout, num_microbatches=1)
    assert report.outcome == "same", str(report)


@each_under("module", [Quantised, Centred, Rebound, Aliased, InPart, BoundAnew], [STAGES, COMBINED])
def test_readers_and_writers_share_one_buffer(worlds, module, layout):
    report = check(worlds, module, layout)
    assert report.outcome == "same", str(report)


@each_under("module", [Hooked], [STAGES, COMBINED])
def test_hook_sees_a_gradient_once(worlds, module, layout):
    report = check(worlds, module, layout)
    assert report.outcome == "same", str(report)


def test_write_that_stages_would_lose_is_not_pipelined(worlds):
    report = check(worlds, WritesThroughData, STAGES)
    assert report.outcome == "same" and "sharded instead of pipelined" in str(report), str(report)


# --- numbers read from the model -------------------------------------------------------------------------------------


class WritesNumbers(Regressor):
    """Other pipeline stages lack the number, and would write a NaN into the checkpoint."""

    def __init__(self):
        super().__init__()
        self.body, self.head = mlp(), nn.Linear(FEATURES, 1)
        self.register_buffer("spread", torch.zeros(()))
        self.register_buffer("row", torch.full((3,), 0.5))

    def forward(self, x):
        h = self.body(x)
        if self.training:
            self.store(h.detach(), h.std().item())
        return self.head(h)


def writes(name, store):
    made = type(name, (WritesNumbers,), {"store": store, "__module__": __name__, "__qualname__": name})
    globals()[name] = made
    return made


NUMBERS = [
    writes("Fills", lambda self, h, number: self.spread.fill_(number)),
    writes("Copies", lambda self, h, number: self.spread.copy_(torch.tensor([2 * number, 1.0]).sum())),
    writes("SetsOne", lambda self, h, number: self.row.__setitem__(1, number)),
    writes("Averages", lambda self, h, number: self.spread.mul_(0.9).add_(0.1 * number)),
    writes("Binds", lambda self, h, number: setattr(self, "spread", torch.full_like(self.spread, number))),
    writes("Scales", lambda self, h, number: self.row.add_(1.0, alpha=number)),
    writes("Rebinds", lambda self, h, number: setattr(self.spread, "data", torch.tensor(number).to(self.spread))),
    writes(
        "WritesLater",
        lambda self, h, number: self.spread.fill_(
            number if self.trainer.fit_loop.epoch_loop.total_batch_idx > 1 else 0
        ),
    ),
]


@pytest.mark.parametrize("module", NUMBERS, ids=lambda module: module.__name__)
def test_model_values_are_equal_on_all_ranks(worlds, module):
    report = check(worlds, module, LAYOUTS[0], steps=4)
    assert report.outcome == "same", str(report)
