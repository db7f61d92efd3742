"""Three stages of layers that do not divide by three, and of unequal size."""

import pytest
import torch
from torch import nn

from harness.trainer_runs import assert_same, ignore_warnings, trainer_of, weights_of
from models.tiny import FEATURES, Tiny, loader


class Uneven(Tiny):
    """Layers of very different sizes; the input skips over the middle and meets the end."""

    def __init__(self, widths):
        super().__init__(layers=0)
        torch.manual_seed(2)
        pairs = zip((FEATURES, *widths), widths, strict=False)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairs)).double()
        self.head = nn.Linear(widths[-1] + FEATURES, 1).double()

    def forward(self, x):
        return self.head(torch.cat([self.layers(x), x], dim=1))

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss


def run(size, pp, widths, options):
    ignore_warnings()
    model = Uneven(widths)
    trainer = trainer_of(size, pp, strategy_options=options)
    units = None
    trainer.fit(model, loader(4))
    if pp > 1:
        first = trainer.strategy.run.plan.first.assignment
        units = [
            [
                node.unit
                for node, stage in zip(first.graph.nodes, first.node_stage, strict=True)
                if stage == s and node.unit
            ]
            for s in range(pp)
        ]
    return weights_of(model), float(trainer.callback_metrics["loss"]), units


WIDTHS = {"4 layers": (8, 8, 8, 8), "7 layers": (6,) * 7, "large first": (64, 4, 4, 4), "large last": (4, 4, 4, 64)}


@pytest.mark.parametrize("schedule", [pytest.param("gpipe", marks=pytest.mark.slow), "1f1b"])
@pytest.mark.parametrize("widths", WIDTHS.values(), ids=list(WIDTHS))
def test_uneven_layers_match_one_process(worlds, widths, schedule):
    [(expected, loss, _)] = worlds.run(1, run, 1, 1, widths, {})
    options = {"num_microbatches": 4, "schedule": schedule}
    for weights, our_loss, units in worlds.run(3, run, 3, 3, widths, options):
        assert_same(weights, expected)
        assert our_loss == pytest.approx(loss, rel=1e-10)
        assert len(units) == 3 and all(units), f"a stage is empty: {units}"
