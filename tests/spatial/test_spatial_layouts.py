"""Convolutional networks with sharded images, under each layout, against one process."""

from functools import partial

import pytest
import torch
from torch import nn

from harness.trainer_runs import assert_same, ignore_warnings, trainer_of, weights_of
from harness.verification import check
from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.errors import LayoutError
from lightning_hybrid.verify import Layout
from models.hand_written import Lit
from models.images import ConvNeXt, Pyramid, UNet, VolumeUNet, images


def layout(name, devices, **options):
    return Layout(name, devices, {"spatial_parallel_size": 2, **options})


TWO, THREE = layout("sp2", 2), Layout("sp3", 3, {"spatial_parallel_size": 3})
LAYOUTS = [
    layout("sp2 x dp2", 4),
    layout("sp2 x dp2, ZeRO-3", 4, zero_stage=3),
    layout("sp2 x pp2", 4, pipeline_parallel_size=2),
    layout("sp2, recompute", 2, recompute="full"),
    layout("sp2, selective", 2, recompute="selective"),
    Layout("sp4", 4, {"spatial_parallel_size": 4}),
]
SIZES = {UNet: (37, 22), ConvNeXt: (50, 41), Pyramid: (45, 38), VolumeUNet: (18, 12, 6)}


class Normed(UNet):
    """Without random numbers, which differ by replica."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Identity()


def same(worlds, make_module, layout, **options):
    make_data = partial(images, *SIZES[make_module], channels=2 if make_module is VolumeUNet else 3)
    report = check(worlds, make_module, layout, make_data=make_data, num_microbatches=None, **options)
    assert report.outcome == "same", str(report)


@pytest.mark.parametrize("make_module", SIZES)
@pytest.mark.parametrize("ranks", [TWO, THREE], ids=str)
def test_networks(worlds, make_module, ranks):
    same(worlds, make_module, ranks)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layouts(worlds, layout):
    same(worlds, UNet, layout)


def test_checkpoint_and_evaluation(worlds):
    same(worlds, UNet, TWO, resume=True)


def weights_after(devices, size):
    ignore_warnings()
    options = {"strategy_options": {"spatial_parallel_size": size}, "sync_batchnorm": True, "precision": "64-true"}
    trainer, model = trainer_of(devices, **options), Normed()
    trainer.fit(model, **images(21, 14))
    return weights_of(model)


def test_sync_batchnorm_takes_statistics_over_replicas_and_rows(worlds):
    [wanted, *_], found = worlds.run(2, weights_after, 2, 1), worlds.run(4, weights_after, 4, 2)
    for weights in found:
        assert_same(weights, wanted)


@pytest.mark.parametrize("precision", ["bf16-mixed"])
def test_mixed_precision(worlds, precision):
    same(worlds, UNet, TWO, precision=precision)


class Flat(Lit):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def loss(self, batch):
        return self.fc(batch[0].mean((2, 3))).square().mean()


def test_a_model_without_images_is_refused(worlds):
    report = check(worlds, Flat, TWO, make_data=partial(images, 8, 8))
    assert report.outcome == "refused", str(report)
    assert "the step calls no convolution of 2 or 3 dims; set spatial_parallel_size=1" in report.message


class Mismatched(UNet):
    """With a mistake behind its convolutions."""

    def loss(self, batch):
        return super().loss(batch) + torch.ones(2) @ torch.ones(3)


def error_of(devices, pipeline):
    ignore_warnings()
    options = {"spatial_parallel_size": 2, "pipeline_parallel_size": pipeline}
    trainer = trainer_of(devices, strategy_options=options)
    with pytest.raises(Exception) as found:
        trainer.fit(Mismatched(), **images(16, 14))
    return type(found.value), str(found.value)


@pytest.mark.parametrize("pipeline", [1, 2])
def test_an_error_of_the_step_is_raised_as_itself(worlds, pipeline):
    for kind, text in worlds.run(2 * pipeline, error_of, 2 * pipeline, pipeline):
        assert kind is RuntimeError and "inconsistent tensor size" in text, text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2 would gather them"),
        ({"compile": True}, "compile='units' would gather them"),
    ],
)
def test_options_that_would_gather_images(options, message):
    with pytest.raises(ValueError, match=message):
        Hybrid3DStrategy(spatial_parallel_size=2, **options)


@pytest.mark.parametrize("size", [0, 1.5, "two"])
def test_sizes(size):
    with pytest.raises(LayoutError, match="spatial_parallel_size="):
        Hybrid3DStrategy(spatial_parallel_size=size)
