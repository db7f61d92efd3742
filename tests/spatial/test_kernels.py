"""Each kernel on sharded rows against the same on a full image: outputs, gradients, buffers, to 1e-10."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from harness.thread_ranks import on_ranks
from lightning_hybrid.spatial.tensor import SpatialMode, SpatialTensor
from lightning_hybrid.step.standins.tensors import materialize

SHAPE = 2, 3, 13, 7
TOLERANCE = 1e-10


class After(nn.Module):
    """A function of the feature maps of a convolution."""

    def __init__(self, function):
        super().__init__()
        self.conv, self.function = nn.Conv2d(3, 4, 3, padding=1), function

    def forward(self, x):
        return self.function(self.conv(x))


def run(model, x, mode):
    """Output, its kind, and all that a backward changes."""
    x = x.clone().requires_grad_()
    with mode:
        out = model(x)
        is_sharded = isinstance(out, SpatialTensor)
        out = materialize(out)
    weights = torch.linspace(0.5, 1, out.numel(), dtype=out.dtype).view(out.shape)
    (out * weights).sum().backward()
    state = [x.grad, *(p.grad for p in model.parameters()), *model.buffers()]
    return is_sharded, [out.detach(), *(materialize(each) for each in state if each is not None)]


def check(model, shape=SHAPE, *, sharded=True, sizes=(2, 3)):
    torch.manual_seed(1)
    model, x = model.double(), torch.randn(shape, dtype=torch.float64)
    _, wanted = run(copy.deepcopy(model), x, contextlib.nullcontext())
    for size in sizes:
        copies = [copy.deepcopy(model) for _ in range(size)]
        found = on_ranks(size, lambda ranks, copies=copies: run(copies[ranks.rank], x, SpatialMode(ranks)))
        for is_sharded, values in found:
            assert is_sharded == sharded
            assert len(values) == len(wanted)
            for value, other in zip(values, wanted, strict=True):
                torch.testing.assert_close(value, other, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation"),
    [
        (3, 1, 1, 1),
        (3, 2, 1, 1),
        (1, 1, 0, 1),
        (1, 2, 0, 1),  # rows that no output reads
        (7, 2, 3, 1),
        (3, 1, 2, 2),
        (5, 3, 0, 1),
        (4, 4, 0, 1),
        ((3, 5), (2, 1), (1, 0), (1, 2)),
    ],
)
@pytest.mark.parametrize("height", [29, 16])
def test_convolution(kernel, stride, padding, dilation, height):
    convolution = nn.Conv2d(3, 4, kernel, stride, padding, dilation)
    check(nn.Sequential(convolution, nn.ReLU(inplace=True)), (2, 3, height, 13))


def test_a_halo_may_be_of_more_rows_than_a_neighbour_has():
    check(nn.Conv2d(3, 4, 9, padding=4), (2, 3, 8, 5), sizes=(4,))


@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_groups_and_asymmetric_padding():
    check(nn.Sequential(nn.Conv2d(3, 6, 3, groups=3), nn.Conv2d(6, 4, 4, padding="same", groups=2)))


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "further", "dilation"),
    [(2, 2, 0, 0, 1), (3, 2, 1, 1, 1), (4, 2, 1, 0, 1), (3, 1, 0, 0, 2), (2, 3, 0, 0, 1), (1, 3, 0, 2, 1)],
)
def test_transposed_convolution(kernel, stride, padding, further, dilation):
    up = nn.ConvTranspose2d(4, 6, kernel, stride, padding, further, groups=2, dilation=dilation)
    check(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), up))


@pytest.mark.parametrize(
    ("mode", "sharded"), [("zeros", True), ("reflect", True), ("replicate", True), ("circular", True)]
)
def test_padding_mode(mode, sharded):
    check(nn.Conv2d(3, 4, 5, padding=2, padding_mode=mode), sharded=sharded)


@pytest.mark.parametrize(
    ("pool", "sharded"),
    [
        (nn.MaxPool2d(2), True),
        (nn.MaxPool2d(3, 2, 1), True),
        (nn.MaxPool2d(5, 1, 2, 2), True),
        (nn.MaxPool2d(2, ceil_mode=True), False),
        (nn.AvgPool2d(2), True),
        (nn.AvgPool2d(3, 2, 1), True),
        (nn.AvgPool2d(3, 2, (0, 1), count_include_pad=False), True),
        (nn.AvgPool2d(3, 2, 1, count_include_pad=False), False),
        (nn.AdaptiveAvgPool2d(3), False),
        (nn.AdaptiveMaxPool2d(2), False),
        (nn.LPPool2d(2, 2), True),
    ],
    ids=repr,
)
def test_pooling(pool, sharded):
    check(After(pool), sharded=sharded)


def test_places_of_maxima_are_those_in_the_full_plane():
    def unpooled(x):
        values, places = F.max_pool2d(x, 2, return_indices=True)
        return F.max_unpool2d(values, places, 2)

    check(After(unpooled), (2, 3, 12, 8), sharded=False)


class Normed(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), norm

    def forward(self, x):
        return self.norm(self.conv(x))


NORMS = {
    "batch": nn.BatchNorm2d(4),
    "batch, cumulative averages": nn.BatchNorm2d(4, affine=False, momentum=None),
    "batch, no averages": nn.BatchNorm2d(4, track_running_stats=False),
    "batch, eval": nn.BatchNorm2d(4).eval(),
    "group": nn.GroupNorm(2, 4),
    "group, no weight": nn.GroupNorm(4, 4, affine=False),
    "instance": nn.InstanceNorm2d(4),
    "instance, averages": nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
}


@pytest.mark.parametrize("name", NORMS)
def test_norm(name):
    check(Normed(NORMS[name]))


def test_local_response_norm():
    check(Normed(nn.LocalResponseNorm(3)))


def test_variance_over_rows():
    check(After(lambda x: torch.cat([torch.var(x, (2, 3)), x.std((0, 2), correction=0).T], 0)), sharded=False)


class ChannelsLast(nn.Module):
    """As in ConvNeXt."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 7, padding=3, groups=1), nn.LayerNorm(4)
        self.up, self.down, self.gain = nn.Linear(4, 16), nn.Linear(16, 4), nn.Parameter(torch.full((4,), 0.1))

    def forward(self, x):
        h = self.conv(x)
        out = self.down(F.gelu(self.up(self.norm(h.permute(0, 2, 3, 1))))) * self.gain
        return h + out.permute(0, 3, 1, 2)


def test_channels_last_linears():
    check(ChannelsLast())


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic"])
@pytest.mark.parametrize("size", [{"scale_factor": 2}, {"size": (20, 11)}, {"scale_factor": 1.7}, {"size": (7, 7)}])
def test_interpolation(mode, size):
    check(After(lambda x: F.interpolate(x, mode=mode, **size)))


@pytest.mark.parametrize(
    "options",
    [
        {"scale_factor": 2, "align_corners": True},
        {"size": (20, 7), "align_corners": True},
        {"scale_factor": 0.5, "antialias": True},
    ],
)
def test_interpolation_with_options(options):
    check(After(lambda x: F.interpolate(x, mode="bilinear", **options)))


@pytest.mark.parametrize("pads", [(1, 2, 3, 0), (0, 0, -2, 3), (0, 0, -1, -1), (2, 1)])
def test_constant_padding(pads):
    check(After(lambda x: F.pad(x, pads, value=0.5)))


TARGETS = torch.randint(0, 4, (2, 13, 7), generator=torch.Generator().manual_seed(0))
TARGETS[0, 0, :3] = -100
VALUES = torch.linspace(0, 1, 2 * 4 * 13 * 7, dtype=torch.float64).view(2, 4, 13, 7)


LOSSES = {
    "cross entropy": lambda x, **how: F.cross_entropy(x, TARGETS, torch.linspace(0.1, 1, 4, dtype=x.dtype), **how),
    "cross entropy of probabilities": lambda x, **how: F.cross_entropy(x, VALUES.softmax(1), **how),
    "mse": lambda x, **how: F.mse_loss(x, VALUES, **how),
    "l1": lambda x, **how: F.l1_loss(x, VALUES, **how),
    "smooth l1": lambda x, **how: F.smooth_l1_loss(x, VALUES, **how),
    "huber": lambda x, **how: F.huber_loss(x, VALUES, **how),
    "bce of logits": lambda x, **how: F.binary_cross_entropy_with_logits(x, VALUES, **how),
    "bce": lambda x, **how: F.binary_cross_entropy(x.sigmoid(), VALUES, **how),
    "kl": lambda x, **how: F.kl_div(x.log_softmax(1), VALUES, **how),
    "mse of means": lambda x, **how: F.mse_loss(x.mean((2, 3), keepdim=True).expand(x.shape), VALUES, **how),
    "mse of two maps": lambda x, **how: F.mse_loss(x, x.detach().square(), **how),
}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.filterwarnings("ignore:reduction")
def test_loss(name, reduction):
    sharded = reduction == "none" and name != "mse of means"
    check(After(lambda x: LOSSES[name](x, reduction=reduction)), sharded=sharded)


OTHERS = {
    "mean": (lambda x: x.mean((2, 3)), False),
    "flatten": (lambda x: x.flatten(1), False),
    "concatenation": (lambda x: torch.cat([x, F.relu(x)], 1), True),
    "rows": (lambda x: x[:, :, 2:-3], False),
    "columns": (lambda x: x[:, 1:, :, ::2], True),
    "roll": (lambda x: x.roll(2, 2), False),
    "gates": (lambda x: F.softmax(x, 1) * torch.sigmoid(x.mean((2, 3), keepdim=True)), True),
    "attention": (lambda x: F.scaled_dot_product_attention(*(x.flatten(2).mT[:, None],) * 3), False),
    "pixel shuffle": (nn.PixelShuffle(2), False),
    "maximum": (lambda x: x.amax((2, 3)), False),
    "write": (lambda x: x.index_fill_(2, torch.tensor([1]), 0.0), True),
    "einsum": (lambda x: torch.einsum("bchw,bcHw->bhH", x, x), False),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_operations(name):
    function, sharded = OTHERS[name]
    check(After(function), sharded=sharded)


@pytest.mark.parametrize("shape", [(1, 2, 12, 8, 4), (1, 2, 8, 12, 4), (1, 2, 4, 8, 12)], ids=str)
def test_volumes_are_sharded_along_their_longest_dim(shape):
    layers = nn.Conv3d(2, 4, 3, padding=1), nn.BatchNorm3d(4), nn.ReLU(), nn.MaxPool3d(2), nn.Conv3d(4, 4, 3, padding=1)
    ups = nn.Upsample(scale_factor=2, mode="trilinear"), nn.ConvTranspose3d(4, 2, 2, 2), nn.AvgPool3d(3, 1, 1)
    check(nn.Sequential(*layers, *ups), shape)


def test_wide_images_are_sharded_along_their_width():
    layers = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)
    check(nn.Sequential(*layers, nn.Upsample(scale_factor=2, mode="bilinear")), (2, 3, 6, 22))


def test_gradients_of_gradients():
    class Penalty(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 4, 3, 2), nn.Flatten())

        def forward(self, x):
            (grad,) = torch.autograd.grad(self.net(x).square().sum(), x, create_graph=True)
            return (grad.flatten(1).norm(dim=1) - 1).square().mean()

    check(Penalty(), sharded=False)


def test_a_function_of_the_user_gets_full_tensors():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            assert x.numpy().shape == x.shape
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    check(After(lambda x: Doubled.apply(x).square()))


def test_images_of_fewer_rows_than_ranks_run_in_full():
    check(nn.Conv2d(3, 4, 3, padding=1), (2, 3, 2, 2), sharded=False, sizes=(3,))
