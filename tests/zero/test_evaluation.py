"""Validation under ZeRO-3: layer by layer where replicas have as many batches, and else with all layers full."""

from functools import partial

import pytest
from lightning.pytorch import Callback
from torch import nn
from torch.nn import functional as F

from harness.fits import Run, fit
from harness.verification import Layout, check
from models.regression import FEATURES, Regressor, mlp, regression_data

BY_LAYER = {"zero_stage": 3, "reshard_after_forward": True}
LAYOUTS = [
    Layout("zero3", devices=2, strategy=BY_LAYER),
    Layout("zero3 x pp2", devices=4, strategy={**BY_LAYER, "pipeline_parallel_size": 2}),
]


class FullLayers(Callback):
    """Counts the layers that are full after a batch of validation, and the most of them in one."""

    def __init__(self):
        self.recorded = [0, 0]

    def on_validation_batch_start(self, trainer, *_):
        groups = [group for group in trainer.strategy.run.active.groups if group.fqn]
        if not hasattr(self, "undo"):
            own = type(groups[0]).gather

            def gather(group):
                own(group)
                self.recorded[1] = max(self.recorded[1], sum(bool(each._full) for each in groups))

            type(groups[0]).gather, self.undo = gather, partial(setattr, type(groups[0]), "gather", own)

    def on_validation_batch_end(self, trainer, *_):
        full = [group.fqn for group in trainer.strategy.run.active.groups if group.fqn and group._full]
        self.recorded[0] = max(self.recorded[0], len(full))

    def on_validation_end(self, *_):
        self.undo()


def test_layers_are_full_one_after_the_other(worlds):
    run = Run("Layers", dp=2, num_batches=4, validate=True, strategy=BY_LAYER, callback=FullLayers)
    for rank in worlds.run(2, fit, run):
        after_batches, most = rank.extra
        assert after_batches == 0 and most <= 2


class SkipsLayers(Regressor):
    """Calls a layer for some batches, so for some replicas."""

    def __init__(self):
        super().__init__()
        self.body, self.often, self.head = mlp(), nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 1)

    def forward(self, x):
        x = self.body(x)
        if self.training or x[0, 0] > 0:
            x = x + self.often(x)
        return self.head(x)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.mse_loss(self(x), y))


def of(num_val):
    return regression_data(num_val=num_val)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("num_val", [16, 13])
def test_replicas_that_call_different_layers(worlds, layout, num_val):
    report = check(worlds, SkipsLayers, layout, make_data=partial(of, num_val))
    assert report.outcome == "same", str(report)


def test_validation_between_accumulated_batches(worlds):
    options = {"trainer": {"accumulate_grad_batches": 2, "val_check_interval": 1}, "steps": 4}
    report = check(worlds, SkipsLayers, LAYOUTS[0], make_data=partial(of, 16), **options)
    assert report.outcome == "same", str(report)
