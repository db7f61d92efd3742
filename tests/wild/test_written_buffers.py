"""Buffers that the step writes from values of the model, and reads elsewhere."""

import torch
from layouts import each_under
from torch.nn import functional as F
from wild.bases import STAGES, Regression
from wild.suite import COMBINED, FEATURES, check


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
    """What enters an early layer is centred by a moving average of what leaves the last one."""

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


class Hooked(Regression):
    """A hook on each value between two layers, of which some are sent from stage to stage."""

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            if x.requires_grad:
                x.register_hook(lambda gradient: 1.5 * gradient)
        return self.head(x)


@each_under("module", [Quantised, Centred], [STAGES, COMBINED])
def test_one_content_for_all_who_read_and_write(worlds, module, layout):
    report = check(worlds, module, layout)
    assert report.outcome == "same", str(report)


@each_under("module", [Hooked], [STAGES, COMBINED])
def test_a_hook_sees_the_gradient_of_a_value_once(worlds, module, layout):
    report = check(worlds, module, layout)
    assert report.outcome == "same", str(report)
