"""Parameters that something still refers to when ZeRO frees their layer: autograd, hooks, checkpoints, other layers."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from harness.verification import check
from lightning_hybrid.verify import Layout
from models.regression import FEATURES, Regression

BY_LAYER = {"zero_stage": 3, "reshard_after_forward": True}
STAGES = {"pipeline_parallel_size": 2, "num_microbatches": 2}


def layout(name, devices=2, **options):
    return Layout(name, devices=devices, strategy={**BY_LAYER, **options})


KEPT, FULL = layout("replicas"), layout("recomputed", recompute="full")
SELECTIVE = layout("selective", recompute="selective")
IN_STAGES, EVERYWHERE = layout("stages", 4, **STAGES), layout("stages, recomputed", 4, recompute="full", **STAGES)
ON_TENSOR_RANKS = layout("tensor ranks, recomputed", 4, recompute="full", tensor_parallel_size=2)


class Adapter(nn.Module):
    """Trained matrices beside a frozen linear, a frozen norm, and frozen scales."""

    def __init__(self):
        super().__init__()
        self.norm, self.frozen = nn.LayerNorm(FEATURES), nn.Linear(FEATURES, FEATURES)
        self.down, self.up = nn.Linear(FEATURES, 2, bias=False), nn.Linear(2, FEATURES, bias=False)
        self.scale, self.gain = (nn.Parameter(torch.linspace(0.5, 1.5, FEATURES)) for _ in range(2))
        for frozen in (*self.norm.parameters(), *self.frozen.parameters(), self.scale, self.gain):
            frozen.requires_grad_(False)

    def inner(self, x):
        h = self.norm(x) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3) * self.gain
        return torch.tanh(self.frozen(h) + self.up(self.down(h))) * self.scale

    def forward(self, x):
        return x + self.inner(x)


class Scale(torch.autograd.Function):
    """Refers to a parameter by an attribute, as fused kernels of adapters do."""

    @staticmethod
    def forward(ctx, x, weight, scale):
        ctx.save_for_backward(x)
        ctx.parameters = weight, scale
        return x @ weight.T * scale

    @staticmethod
    def backward(ctx, grad):
        (x,), (weight, scale) = ctx.saved_tensors, ctx.parameters
        return grad * scale @ weight, (grad * scale).T @ x, None


class Applies(Adapter):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(FEATURES) / 2)

    def forward(self, x):
        return x + Scale.apply(x, self.weight, self.gain)


class HooksItsOutput(Adapter):
    def forward(self, x):
        h = self.inner(x)
        out = x + h
        if out.requires_grad:
            h.register_hook(lambda grad: grad * self.scale)
            out.register_hook(lambda grad: grad * self.gain)
        return out


class HooksItself(Adapter):
    def __init__(self):
        super().__init__()
        self.register_full_backward_hook(lambda layer, grads, _: (grads[0] * layer.scale,))
        self.register_full_backward_pre_hook(lambda layer, grads: (grads[0] * layer.gain,))


class ChecksInside(Adapter):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class SavesItself(Adapter):
    def forward(self, x):
        with save_on_cpu():
            x = super().forward(x)
        with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            return super().forward(x)


class ReturnsScale(Adapter):
    """The next layer multiplies by its scale."""

    def forward(self, x):
        return super().forward(x), self.scale


KINDS = [Adapter, Applies, HooksItsOutput, HooksItself, ChecksInside, SavesItself, ReturnsScale]


class Holds(Regression):
    """A layer of each kind."""

    kinds = KINDS

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(kind() for kind in self.kinds)

    def run(self, layer, x):
        return layer(x)

    def forward(self, x):
        for layer in self.layers:
            x = self.run(layer, x)
            if isinstance(x, tuple):
                x = x[0] * x[1]
        return self.head(x)


@pytest.mark.parametrize(
    "layout",
    [
        KEPT,
        EVERYWHERE,
        pytest.param(FULL, marks=pytest.mark.slow),
        pytest.param(SELECTIVE, marks=pytest.mark.slow),
        pytest.param(IN_STAGES, marks=pytest.mark.slow),
        pytest.param(ON_TENSOR_RANKS, marks=pytest.mark.slow),
    ],
    ids=lambda layout: layout.name,
)
def test_layers_whose_parameters_something_refers_to(worlds, layout):
    report = check(worlds, Holds, layout)
    assert report.outcome == "same", str(report)


class Adapters(Holds):
    kinds = [Adapter] * 4


class Differentiates(Adapters):
    """A penalty on the gradient of its input: a backward that another one runs through."""

    def loss(self, batch):
        x, y = batch[0].requires_grad_(), batch[1]
        out = self(x)
        [gradient] = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.mse_loss(out, y) + gradient.pow(2).mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", super().loss(batch))


class RunsTwice(Adapters):
    def loss(self, batch):
        x, y = batch
        return F.mse_loss(self(x), y + self(x.flip(1)))


class ChecksLayers(Adapters):
    def run(self, layer, x):
        return checkpoint(layer, x, use_reentrant=False)


class ChecksPairs(Adapters):
    def forward(self, x):
        x.requires_grad_()
        for first in (0, 2):
            x = checkpoint(nn.Sequential(*self.layers[first : first + 2]), x, use_reentrant=True)
        return self.head(x)


class Rounds(Adapters):
    """Hooks around layers see what these save, as without ZeRO."""

    def loss(self, batch):
        def pack(tensor):
            return tensor.to(torch.bfloat16) if type(tensor) is torch.Tensor and tensor.dim() == 2 else tensor

        def unpack(tensor):
            return tensor.double() if tensor.dtype is torch.bfloat16 else tensor

        with saved_tensors_hooks(pack, unpack):
            return super().loss(batch)


@pytest.mark.parametrize(
    ("module", "layout"),
    [
        (Differentiates, FULL),
        (ChecksLayers, KEPT),
        (Rounds, KEPT),
        pytest.param(RunsTwice, FULL, marks=pytest.mark.slow),
        pytest.param(ChecksPairs, KEPT, marks=pytest.mark.slow),
        *(
            pytest.param(module, EVERYWHERE, marks=pytest.mark.slow)
            for module in (Differentiates, RunsTwice, ChecksLayers, ChecksPairs)
        ),
    ],
    ids=lambda value: getattr(value, "__name__", None) or value.name,
)
def test_steps_that_run_backwards_and_checkpoints_of_their_own(worlds, module, layout):
    report = check(worlds, module, layout)
    assert report.outcome == "same", str(report)
