"""Techniques of a user: their code runs around layers, and on complete gradients, under every layout."""

import re

import pytest
import torch
from lightning.pytorch import Callback

from harness.fits import Run, assert_parity, fit, reference_of, refusal
from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.techniques import LayerTechnique, Technique, computed_parameters
from models.hand_written import Layers


class Tanh(LayerTechnique):
    """Layers compute with ``tanh(w)``."""

    def forward(self, name, layer, forward, *args, **kwargs):
        with computed_parameters(layer, torch.tanh):
            return forward(*args, **kwargs)


class Clamped(LayerTechnique):
    """Gradients are cut element by element."""

    def gradients(self, parameters):
        for parameter in parameters.values():
            parameter.grad.clamp_(-1e-3, 1e-3)


class ByHand(Layers):
    """What `Tanh` and `Clamped` do, written into the module."""

    def forward(self, x):
        for layer in self.layers:
            with computed_parameters(layer, torch.tanh):
                x = x + layer(x)
        with computed_parameters(self.head, torch.tanh):
            return self.head(x)

    def on_after_backward(self):
        Clamped().gradients(dict(self.named_parameters()))


LAYOUTS = {
    "one process": {},
    "dp2": {"dp": 2},
    "pp2 x dp2": {"pp": 2, "dp": 2},
    "zero1": {"dp": 2, "strategy": {"zero_stage": 1}},
    "zero3": {"dp": 2, "strategy": {"zero_stage": 3, "reshard_after_forward": True}},
    "tp2": {"tp": 2},
    "recompute": {"pp": 2, "strategy": {"recompute": "full"}},
    "compiled": {"strategy": {"compile": {"backend": "eager"}}},
    "offload": {"dp": 2, "strategy": {"zero_stage": 2, "offload": "cpu"}},
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_equals_a_module_with_it_written_in(worlds, layout):
    options = {**layout.get("strategy", {}), "techniques": [Tanh(), Clamped()]}
    run = Run(Layers, **{**layout, "strategy": options})
    ranks = worlds.run(run.world_size, fit, run)
    assert_parity(ranks, reference_of(worlds, Run(ByHand, **{**layout, "strategy": {}})), run)


class Lines(Callback):
    def on_train_start(self, trainer, pl_module):
        self.recorded = [line for each in trainer.strategy.run.techniques for line in each.lines(trainer.strategy.run)]


def test_start_table_names_it(worlds):
    run = Run(Layers, pp=2, strategy={"techniques": [Tanh()]}, callback=Lines)
    assert worlds.run(2, fit, run)[0].extra == ["technique: Tanh"]


def test_gradients_that_are_freed_are_refused(worlds):
    run = Run(Layers, dp=2, strategy={"techniques": [Clamped()], "optimizer_in_backward": True})
    for text in worlds.run(2, refusal, fit, run):
        assert re.search("BackwardStepError.*Clamped changes complete gradients", text), text


def test_what_is_no_technique_is_refused():
    with pytest.raises(TypeError, match=r"techniques has <class.*; use objects of a class"):
        Hybrid3DStrategy(techniques=[Tanh])
    with pytest.raises(ValueError, match="verify_first_step=True compares the first step with one process"):
        Hybrid3DStrategy(techniques=[Technique()], verify_first_step=True)
    assert "techniques=[<" in repr(Hybrid3DStrategy(techniques=[Tanh()]))
