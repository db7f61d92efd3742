"""What a module's own checkpoints run again is predicted: its seconds and FLOPs, and what it does not save."""

import importlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_hybrid.planning.costs import record_costs
from lightning_hybrid.predict.hardware import load_hardware
from lightning_hybrid.predict.layer_time import CONSTANTS, layer_seconds
from lightning_hybrid.predict.layout import PlanLayout
from lightning_hybrid.randomness.keyed import KeyedRandomness
from lightning_hybrid.step.recording.record import Recipe
from lightning_hybrid.step.recording.units import choose_units

pl = importlib.import_module("lightning.pytorch")
WIDTH, BATCH = 64, 8


class Layer(nn.Module):
    """A product that is always saved, and an MLP under a checkpoint, if there is one (``reentrant`` or not)."""

    def __init__(self, reentrant, nested):
        super().__init__()
        self.reentrant, self.nested = reentrant, nested
        self.before, self.up, self.down = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
        )

    def mlp(self, x):
        return self.down(F.gelu(self.again(self.up, x) if self.nested else self.up(x)))

    def again(self, function, x):
        return function(x) if self.reentrant is None else checkpoint(function, x, use_reentrant=self.reentrant)

    def forward(self, x):
        return F.gelu(self.again(self.mlp, F.gelu(self.before(x))))


class Layers(pl.LightningModule):
    def __init__(self, reentrant=None, nested=False, around=None):
        super().__init__()
        self.around = around
        self.layers = nn.ModuleList(Layer(reentrant, nested) for _ in range(3))

    def training_step(self, batch, batch_idx):
        x = batch
        for layer in self.layers:
            x = layer(x) if self.around is None or x is batch else checkpoint(layer, x, use_reentrant=self.around)
        return x.square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self):
        return DataLoader(torch.randn(2 * BATCH, WIDTH), BATCH)


def layers_of(**options):
    """The costs of each layer of a recorded step."""
    return list(record_costs(pl, Layers(**options), {}, "32-true").costs.single_layers())


def seconds_of(layer, **layout):
    number_format = record_costs(pl, Layers(), {}, "32-true").number_format
    layout = PlanLayout(batch=BATCH, microbatch=BATCH, **layout)
    return layer_seconds(layer, layout, number_format, load_hardware("cpu"), CONSTANTS)


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved-tensors", "reentrant"])
def test_a_checkpoint_inside_of_a_layer(reentrant):
    plain, own = layers_of()[1], layers_of(reentrant=reentrant)[1]
    assert own.flops == plain.flops and own.outputs == plain.outputs
    assert plain.again == 0.0 and own.again == pytest.approx(4 / 5)  # the products of the MLP
    # Its input in place of the two values of the MLP, of twice the width.
    assert plain.saved - own.saved == pytest.approx(4 * WIDTH)
    full = seconds_of(plain, recompute="full").again
    assert seconds_of(plain).again == 0.0 and seconds_of(own).again == pytest.approx(4 / 5 * full)
    assert seconds_of(own, recompute="full").again == pytest.approx((1 + 4 / 5) * full)


def test_nested_checkpoints_run_once_more_each():
    assert layers_of(reentrant=False, nested=True)[1].again == pytest.approx((4 + 2) / 5)


@pytest.mark.parametrize("around", [False, True], ids=["saved-tensors", "reentrant"])
def test_a_checkpoint_around_a_layer(around):
    first, *others = layers_of(around=around)
    assert first.again == 0.0 and [each.again for each in others] == [1.0, 1.0]
    assert layers_of(around=around, reentrant=False)[1].again == pytest.approx(1 + 4 / 5)


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved-tensors", "reentrant"])
def test_flops_of_the_step_are_those_of_the_plain_module(reentrant):
    """Monitors compare them with the time of a step: what runs again is no progress."""

    def counted(module):
        batch = torch.randn(BATCH, WIDTH)
        how = {"name": "training_step", "randomness": KeyedRandomness(0, torch.device("cpu")), "trains": True}
        recipe = Recipe(module, lambda: module.training_step(batch, 0), choose_units(module, 1), **how)
        return sum(node.step_flops for node in recipe.record().graph.nodes)

    assert counted(Layers(reentrant=reentrant)) == counted(Layers()) > 0
