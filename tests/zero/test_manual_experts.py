"""Manual optimization of experts that ranks shard, whose states ZeRO shards over other ranks than the rest's."""

import pytest
import torch
from torch import nn

from harness.verification import check
from lightning_hybrid.verify import Layout
from models.regression import FEATURES, Manual


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
            out[mask] = expert(x[mask]) * gate[mask].unsqueeze(-1)
        return x + out


class TwoOptimizers(Manual):
    """One steps in each batch, with experts of the first layer; the other one in every second batch."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Routed() for _ in range(2))

    def training_step(self, batch, batch_idx):
        each, every_second = self.optimizers()
        loss = self.loss(batch)
        self.manual_backward(loss)
        self.clip_gradients(each, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        each.step()
        each.zero_grad()
        if batch_idx % 2:
            every_second.step()
            every_second.zero_grad()
        self.log("loss", loss)

    def configure_optimizers(self):
        first = [*self.layers[0].parameters(), *self.head.parameters()]
        return torch.optim.AdamW(first, lr=1e-2, eps=1e-4), torch.optim.SGD(self.layers[1].parameters(), 0.1, 0.9)


@pytest.mark.parametrize("stage", [0, 1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_matches_one_process(worlds, stage):
    layout = Layout(
        "ep2 x zero", devices=4, strategy={"expert_parallel_size": 2, **({"zero_stage": stage} if stage else {})}
    )
    report = check(worlds, TwoOptimizers, layout, steps=4, timeout=120, num_microbatches=1)
    assert report.outcome == "same", str(report)
