"""Sharded weights are full where a step reads them, also if the first training step did not read them."""

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from harness.verification import TENSOR, check
from lightning_hybrid.verify import Layout
from models.regression import FEATURES, Regression, regression_data

TP2 = Layout("tp2", devices=2, strategy={"tensor_parallel_size": 2})


class Wide(Regression):
    """A layer that tensor ranks cut, and a head."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(FEATURES, 4 * FEATURES), nn.Tanh(), nn.Linear(4 * FEATURES, FEATURES))
            for _ in range(2)
        )


class ValidatesNorms(Wide):
    """Only validation reads the weights."""

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))
        self.log("norm", self.layers[0][0].weight.norm())
        self.log("sum", torch.stack([parameter.abs().sum() for parameter in self.parameters()]).sum())


class PenalizesLater(Wide):
    """A penalty from the second batch on."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if batch_idx > 0:
            loss = loss + 0.1 * self.layers[0][0].weight.square().sum() + 0.1 * self.layers[1][2].weight.abs().max()
        return loss


class ClampsLater(Wide):
    """Writes to the weight that it reads."""

    def training_step(self, batch, batch_idx):
        if batch_idx > 0:
            weight = self.layers[0][0].weight
            weight.data.clamp_(-0.2, 0.2)
            with torch.no_grad():
                self.layers[1][0].weight.mul_(0.5 / self.layers[1][0].weight.norm())
        return super().training_step(batch, batch_idx)


class NormalisesLater(Wide):
    """A layer runs with weights computed from all of its own, from the second batch on."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 0:
            return super().training_step(batch, batch_idx)
        x, y = batch
        layer = self.layers[0]
        weights = {name: p / (1 + p.norm()) for name, p in layer.named_parameters()}
        h = self.layers[1](functional_call(layer, weights, (x,)))
        return F.mse_loss(self.head(h), y)


class EmbedsThenScores(Wide):
    """Training embeds rows; validation multiplies by all of them, as retrieval does."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(12, FEATURES)

    def training_step(self, batch, batch_idx):
        x, y = batch
        chosen = self.table((x[:, 0] * 5).long().abs())
        loss = F.mse_loss(self(x + chosen), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, _ = batch
        x = x + self.layers[0](self.table.weight).mean(0)  # a sharded layer gets the weight of another
        scores = F.normalize(x, dim=-1) @ F.normalize(self.table.weight, dim=-1).t()
        self.log("best", scores.topk(3).indices.double().mean())


@pytest.mark.parametrize("layout", [TP2, TENSOR], ids=lambda layout: layout.name)
@pytest.mark.parametrize("module", [ValidatesNorms, PenalizesLater, ClampsLater, NormalisesLater, EmbedsThenScores])
def test_later_steps_read_full_weights(worlds, module, layout):
    report = check(worlds, module, layout, make_data=regression_data, steps=3)
    assert report.outcome == "same", str(report)


class Routed(nn.Module):
    """The best of four experts for each sample."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(FEATURES, 4, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(FEATURES, 2 * FEATURES), nn.Tanh(), nn.Linear(2 * FEATURES, FEATURES))
            for _ in range(4)
        )

    def forward(self, x):
        gate, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            mask = chosen == index
            if mask.any():
                out[mask] = expert(x[mask]) * gate[mask].unsqueeze(-1)
        return x + out


class ExpertsPenalized(Regression):
    """Every step adds the weights' squares to its loss."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Routed() for _ in range(2))

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch) + 1e-2 * sum(parameter.pow(2).sum() for parameter in self.parameters())
        self.log("loss", loss)
        return loss


class ExpertsMeasured(Regression):
    """Only validation reads the weights of experts."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Routed() for _ in range(2))

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))
        self.log("norm", torch.stack([parameter.norm() for parameter in self.parameters()]).norm())


EP2 = Layout("ep2", devices=2, strategy={"expert_parallel_size": 2})


def test_validation_reads_experts(worlds):
    report = check(worlds, ExpertsMeasured, EP2, make_data=regression_data, steps=3)
    assert report.outcome == "same", str(report)


def test_training_step_reads_experts(worlds):
    """Otherwise it would see only local ones."""
    report = check(worlds, ExpertsPenalized, EP2, make_data=regression_data, steps=3)
    assert report.outcome == "refused" and "'layers.0.experts.0.0.weight'" in report.message, str(report)
