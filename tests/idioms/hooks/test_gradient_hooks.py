"""Gradient hooks on parameters: they get full gradients, once per step, and may read full parameters."""

import pytest
import torch
from torch import nn

from harness.verification import REPLICAS, STAGES, TENSOR, check
from lightning_hybrid.verify import Layout
from models.regression import FEATURES, Regression

TP2 = Layout("tp2", devices=2, strategy={"tensor_parallel_size": 2})
LAYERWISE = {"zero_stage": 3, "reshard_after_forward": True}
BY_LAYER = Layout("ZeRO-3 by layer", devices=2, strategy=LAYERWISE)
BY_LAYER_PP2 = Layout("pp2 x ZeRO-3 by layer", devices=4, strategy={"pipeline_parallel_size": 2, **LAYERWISE})
ZERO = Layout("dp2 x tp2, ZeRO-3", devices=4, strategy={"tensor_parallel_size": 2, "zero_stage": 3})


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(FEATURES, 32), nn.Linear(32, FEATURES)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Hooked(Regression):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def hooked(self):
        for layer in self.layers:
            for parameter in (layer.up.weight, layer.up.bias, layer.down.weight):
                yield parameter, torch.arange(parameter.numel(), dtype=torch.float64).view(parameter.shape).cos()

    def on_fit_start(self):
        for parameter, mask in self.hooked():
            parameter.register_hook(lambda gradient, mask=mask: gradient * mask)


class InPlace(Hooked):
    def on_fit_start(self):
        for parameter, mask in self.hooked():
            parameter.register_hook(lambda gradient, mask=mask: (gradient.mul_(mask), None)[1])


class Accumulated(Hooked):
    """Hooks that write the gradient and read the parameter."""

    def on_fit_start(self):
        masks = dict(self.hooked())

        def hook(parameter):
            parameter.grad.mul_(masks[parameter]).add_(parameter.detach(), alpha=0.1)

        for parameter in masks:
            parameter.register_post_accumulate_grad_hook(hook)


class Scaled(Hooked):
    """Gradients of unit length: no linear function of them. Registered in each step."""

    def on_fit_start(self):
        self.handles = []

    def training_step(self, batch, batch_idx):
        for parameter, _ in self.hooked():
            self.handles.append(parameter.register_hook(lambda gradient: gradient / gradient.norm()))
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_):
        for handle in self.handles:
            handle.remove()
        self.handles.clear()


class Decayed(Hooked):
    """Hooks of either kind that read their parameters, some of which no backward reads; registered in a step or before.

    What is registered in the step comes after the package's own hooks.
    """

    in_step = False

    def __init__(self):
        super().__init__()
        self.offsets = nn.ModuleList(nn.Embedding(4, FEATURES) for _ in range(2))

    def forward(self, x):
        index = (4 * x[:, 0].sigmoid()).long()
        for offset in self.offsets:
            x = x + offset(index)
        return super().forward(x)

    def register(self):
        def after(parameter):
            parameter.grad.add_(parameter.detach(), alpha=0.1)

        for parameter in [*self.offsets[0].parameters(), self.layers[0].up.weight]:
            parameter.register_post_accumulate_grad_hook(after)
        for parameter in [*self.offsets[1].parameters(), self.layers[1].up.weight]:
            parameter.register_hook(lambda gradient, parameter=parameter: gradient + 0.1 * parameter.detach())

    def on_fit_start(self):
        if not self.in_step:
            self.register()

    def training_step(self, batch, batch_idx):
        if self.in_step:
            self.in_step = False
            self.register()
        return super().training_step(batch, batch_idx)


class DecayedInStep(Decayed):
    in_step = True


class InFirstStep(Hooked):
    """Hooks of either kind, no linear functions of the gradient, which the first step registers."""

    def on_fit_start(self):
        self.is_hooked = False

    def training_step(self, batch, batch_idx):
        if not self.is_hooked:
            self.is_hooked = True
            for index, (parameter, mask) in enumerate(self.hooked()):
                if index % 2:
                    parameter.register_hook(lambda gradient, mask=mask: gradient * mask + gradient.square())
                else:
                    parameter.register_post_accumulate_grad_hook(
                        lambda p, mask=mask: (p.grad.mul_(2).add_(mask), None)[1]
                    )
        return super().training_step(batch, batch_idx)


class InEachStep(Hooked):
    """Hooks that each step registers, and a hook of the trainer removes; the module keeps one handle of each."""

    def on_fit_start(self):
        self.handles = {}

    def training_step(self, batch, batch_idx):
        for index, (parameter, _) in enumerate(self.hooked()):
            self.handles[index] = parameter.register_hook(lambda gradient: gradient + gradient.square())
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_):
        for handle in self.handles.values():
            handle.remove()


class ReadsOthers(Hooked):
    """Hooks on parameters and modules that read one of another layer, which may be freed, or of another stage."""

    def on_fit_start(self):
        first, last = self.layers[0].up.weight, self.layers[2]

        def scale_in_place(parameter):
            parameter.grad.mul_(first.norm())

        last.up.weight.register_hook(lambda gradient: gradient * first.detach().square().sum())
        last.down.weight.register_post_accumulate_grad_hook(scale_in_place)
        last.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * first.mean(),))
        self.layers[1].register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * self.head.weight.norm(),))


ALONE = Layout("one rank", devices=1)
INTERLEAVED = Layout("pp2, 2 stages each", devices=2, strategy={"pipeline_parallel_size": 2, "stages_per_rank": 2})
PARTS = [  # in two microbatches
    *((module, layout) for module in (InFirstStep, InEachStep) for layout in (STAGES, ALONE)),
    *(pytest.param(module, INTERLEAVED, marks=pytest.mark.slow) for module in (InFirstStep, InEachStep)),
    (Scaled, STAGES),
    (Decayed, BY_LAYER),
    (Accumulated, STAGES),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in ((Accumulated, REPLICAS), (Decayed, BY_LAYER_PP2))),
]
CASES = [
    (DecayedInStep, BY_LAYER),
    *((module, TP2) for module in (Hooked, Accumulated, Scaled, ReadsOthers)),
    *((ReadsOthers, layout) for layout in (BY_LAYER, STAGES)),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            (Hooked, TENSOR),
            (Accumulated, TENSOR),
            (Hooked, ZERO),
            (InPlace, ZERO),
            (Decayed, BY_LAYER),
            *((ReadsOthers, layout) for layout in (REPLICAS, TENSOR, ZERO, BY_LAYER_PP2)),
        )
    ),
]


@pytest.mark.parametrize(("module", "layout"), CASES)
def test_matches_one_process(worlds, module, layout):
    report = check(worlds, module, layout, num_microbatches=1)
    assert report.outcome == "same", str(report)


@pytest.mark.parametrize(("module", "layout"), PARTS)
def test_see_the_gradient_of_all_microbatches(worlds, module, layout):
    report = check(worlds, module, layout, num_microbatches=2)
    assert report.outcome == "same", str(report)


ZERO2 = Layout("ZeRO-2", devices=2, strategy={"zero_stage": 2})
BATCHES = [
    ZERO2,
    BY_LAYER,
    *(pytest.param(each, marks=pytest.mark.slow) for each in (REPLICAS, BY_LAYER_PP2, TP2, ZERO)),
]


@pytest.mark.parametrize("num_microbatches", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("layout", BATCHES)
def test_see_the_gradient_of_accumulated_batches(worlds, layout, num_microbatches):
    options = {"trainer": {"accumulate_grad_batches": 2}, "num_microbatches": num_microbatches}
    report = check(worlds, Accumulated, layout, steps=4, **options)
    assert report.outcome == "same", str(report)
