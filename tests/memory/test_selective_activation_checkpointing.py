"""Selective activation checkpointing saves expensive values: fewer bytes, bitwise equal, for any layer code."""

import gc
import math

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from harness.live_storages import LiveStorages
from lightning_hybrid.memory.recompute.layers import Recomputation
from lightning_hybrid.memory.recompute.policies import layer_policies
from lightning_hybrid.memory.recompute.selective import LayerCosts, LayerRun, Product
from lightning_hybrid.step.objects.modules import find_layers


class Block(nn.Module):
    def __init__(self, width=32, dropout=0.0):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = dropout

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, 2, width // 2).transpose(1, 2)
            for part in self.qkv(self.norm_1(x)).split(width, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.out(y.transpose(1, 2).reshape(batch, length, width)), self.dropout)
        return x + F.dropout(self.mlp(self.norm_2(x)), self.dropout)


def bytes_and_gradients(model, x, recompute):
    """Bytes saved for the backward except weights, and all gradients."""
    layers = find_layers({"": model})
    recomputation = Recomputation(layers, layer_policies(recompute, layers))
    with recomputation.running():
        model(x)  # a first run keeps nothing, and measures
    torch.manual_seed(3)
    with LiveStorages() as live, recomputation.running():
        out = model(x)
    weights = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in model.parameters()}
    kept = live.bytes() - sum(nbytes for address, nbytes in weights.items() if address in live.made)
    return kept, [out.detach(), *torch.autograd.grad(out.sin().sum(), [x, *model.parameters()])]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_twelve_layers_save_less(dropout):
    """The bounds: selective 40 %, full 25 %. Generator states, a few kB for each dropout, are extra."""
    model = nn.Sequential(*(Block(dropout=dropout) for _ in range(12)))
    x = torch.randn(4, 64, 32, requires_grad=True)
    kept, results = {}, {}
    for recompute in ("keep", "selective", 0.25, "full"):
        kept[recompute], results[recompute] = bytes_and_gradients(model, x, recompute)
    assert kept["full"] < kept[0.25] < kept["selective"]
    assert kept["selective"] <= 0.4 * kept["keep"] and kept[0.25] <= 0.28 * kept["keep"]
    assert kept["full"] <= 0.25 * kept["keep"]
    for recompute in ("selective", 0.25, "full"):
        assert_same_bits(results["keep"], results[recompute])


def assert_same_bits(expected, got):
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


class WritesAll(nn.Module):
    """Writes to values of every kind."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros(6))
        self.register_buffer("before", torch.zeros(6))

    def forward(self, x):
        self.seen.add_(x.detach().mean((0, 1)))
        self.before.data.mul_(0.5).add_(self.seen)  # the next call writes to what this one's backward reads
        x = (x * 1).unsqueeze_(0).squeeze_(0) * self.before.exp().sin()
        h = F.relu(self.a(x).mul_(2).add_(self.seen), inplace=True)  # over a full result
        self.seen.mul_(0.5)  # read by recomputed operations
        h = h + F.dropout(self.a(h), 0.3, inplace=True)
        out = torch.empty_like(h)
        out[..., :3] = self.b(h)[..., 3:].tanh()  # through a view
        out[..., 3:] = h[..., :3].sigmoid()
        late = torch.ones_like(out)
        scaled = out * late.exp()  # saves what was there before it is written
        late.mul_(3)
        return x + scaled * (out.sin() * late).unsqueeze(0).squeeze(0)


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x, x.square())
        ctx.once = x * 2
        return x**3

    @staticmethod
    def backward(ctx, grad):
        x, square = ctx.saved_tensors
        assert torch.equal(square, x * x)
        return grad * 3 * square + 0 * ctx.once


class UnusualOps(nn.Module):
    """A custom function, a user checkpoint, convolutions, recurrence, a branch, bfloat16."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(6, 6, 3, padding=1), nn.BatchNorm1d(6)
        self.lstm = nn.LSTM(6, 6, batch_first=True)
        self.inner = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Dropout(0.2), nn.Linear(12, 6))

    def forward(self, x):
        h = self.norm(self.conv(x.transpose(1, 2)).exp()).transpose(1, 2)
        h = Squares.apply(h.tanh()) + self.lstm(h.sigmoid())[0]
        h = h + torch.utils.checkpoint.checkpoint(self.inner, h, use_reentrant=False)
        if x.shape[0] > 2:
            h = h.cumsum(1).softmax(-1)
        h = h + torch.view_as_complex(h.exp().unflatten(-1, (3, 2)).contiguous()).abs().repeat_interleave(2, -1)
        with torch.autocast("cpu", torch.bfloat16):
            h = self.inner(h) + self.inner(h.float().exp())
            with torch.autocast("cpu", enabled=False):
                h = self.inner(h.float().tanh())
        return x + h * torch.rand_like(h)


@pytest.mark.parametrize("share", ["selective", 0.01])
@pytest.mark.parametrize("kind", [WritesAll, UnusualOps])
def test_unusual_layers(kind, share):
    """As many calls wait for their backward as in a schedule; buffers are written once for each."""
    results = {}
    for recompute in ("keep", share):
        torch.manual_seed(1)
        layers = {str(k): kind() for k in range(2)}
        x = torch.randn(4, 5, 6, requires_grad=True)
        model = nn.Sequential(*layers.values())
        with Recomputation(layers, dict.fromkeys(layers, recompute)).running():
            outs = [model(part) for part in (x, x[:2], x[:, :3])]
            # Under autocast, as a trainer has it around backwards too.
            with torch.autocast("cpu", torch.bfloat16):
                for out in outs:
                    out.float().sin().sum().backward()
        results[recompute] = [x.grad, *(p.grad for p in model.parameters()), *model.buffers(), *outs]
        assert not torch.equal(results[recompute][0], torch.zeros_like(x))
    assert_same_bits(*results.values())


@pytest.mark.parametrize("recompute", ["selective", 0.01, "full"])
def test_derivatives_inside_a_step(recompute):
    """Forces: the graph of the gradient has gradients too; and a retained graph runs twice."""
    results = {}
    for policy in ("keep", recompute):
        torch.manual_seed(2)
        model = nn.Sequential(*(Block(8) for _ in range(3))).double()
        layers = find_layers({"": model})
        x = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
        with (
            torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
            Recomputation(layers, dict.fromkeys(layers, policy)).running(),
        ):
            energy = model(x).sin().sum()
            [force] = torch.autograd.grad(energy, x, create_graph=True)
            (energy + force.square().sum()).backward(retain_graph=True)
            energy.backward()
        results[policy] = [force.detach(), x.grad, *(p.grad for p in model.parameters())]
    assert_same_bits(*results.values())


class Inside(nn.Module):
    """Takes derivatives of its own values."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        [slope] = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        return slope + x


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_derivatives_inside_a_layer(recompute):
    results = {}
    for policy in ("keep", recompute):
        torch.manual_seed(2)
        layers = {str(k): Inside() for k in range(2)}
        x = torch.randn(3, 4, requires_grad=True)
        with Recomputation(layers, dict.fromkeys(layers, policy)).running():
            layers["1"](layers["0"](x)).square().sum().backward()
        results[policy] = [x.grad, *(p.grad for layer in layers.values() for p in layer.net[:2].parameters())]
    assert_same_bits(*results.values())


@pytest.mark.parametrize("recompute", ["selective", 0.01, "full"])
def test_changes_after_the_layer_are_refused(recompute):
    """Its recomputation would read the written values."""
    layer = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6))
    x = torch.randn(4, 6, requires_grad=True) * 1
    with Recomputation({"body.0": layer}, {"body.0": recompute}).running():
        h = layer(x)
        x += h
        with pytest.raises(RuntimeError, match="changed in place"):
            x.sum().backward()


def test_nothing_is_left_behind():
    """A freed graph frees its recipes and their tensors, without the garbage collector."""
    model = nn.Sequential(*(Block() for _ in range(2)))
    layers = find_layers({"": model})
    gc.collect()
    gc.disable()
    try:
        with LiveStorages() as live, Recomputation(layers, dict.fromkeys(layers, "selective")).running():
            for is_run in (True, False, True, False):
                out = model(torch.randn(4, 16, 32))
                if is_run:
                    out.sum().backward()
                del out
        model.zero_grad()
        weights = {p.untyped_storage()._cdata for p in model.parameters()}
        left = [size for address, (ref, size) in live.made.items() if not ref.expired() and address not in weights]
        assert not left
    finally:
        gc.enable()


def test_choice_of_kept_results():
    """Those of the most work per byte that fit; a collective's always."""
    products = Product(400, 40, True), Product(100, 40, True), Product(300, 10, False), Product(math.inf, 5, False)
    costs = LayerCosts(products, input_bytes=10, saved_bytes=190, work=1000)
    for share, kept in [(0.0, {3}), (0.1, {3}), (0.13, {2, 3}), (0.4, {2, 3, 0}), (1.0, {0, 1, 2, 3})]:
        assert costs.chosen(share) == kept, share
    assert costs.kept_bytes({0, 2}) == 50 and costs.kept_bytes({0, 2}, unsaved=True) == 10


class Attends(nn.Module):
    """Attention with dropout draws before other dropout: a kept result would leave the generator behind."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).split(8, -1))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3).transpose(1, 2).flatten(2)
        return x + F.dropout(self.out(F.dropout(y, 0.2)).sin(), 0.2)


class Cached(nn.Module):
    """Its first run computes something that later ones find: a repetition has other products."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.table = nn.Linear(8, 8), nn.Linear(8, 8), None

    def forward(self, x):
        if self.table is None:
            self.table = torch.ones(8, 3) @ torch.ones(3, 8)
        return self.b((self.a(x) @ self.table).sin()).sin()


class Written(nn.Module):
    """Writes to the results of products."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        h = F.relu(self.a(x), inplace=True)
        y = self.b(h)
        y.view(-1)[:5].mul_(3)
        return (self.a(y.sin()).add_(h) * 2).exp()


@pytest.mark.parametrize("kind", [Attends, Cached, Written])
def test_kept_results_that_cannot_be_used(kind):
    results = {}
    for recompute in ("keep", 1.0):
        torch.manual_seed(1)
        layer, x = kind(), torch.randn(2, 5, 8, requires_grad=True)
        with Recomputation({"0": layer}, {"0": recompute}).running():
            for _ in range(2):
                layer.table = None
                layer(x).sum().backward()
        results[recompute] = [x.grad, *(p.grad for p in layer.parameters())]
    assert_same_bits(*results.values())


def test_kept_products_do_not_run_again():
    """The last one does not either: the repetition ends before it."""
    layer = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 8))
    for share, times in [(1.0, 2), (0.01, 3)]:
        with Recomputation({"0": layer}, {"0": share}).running():
            layer(torch.randn(4, 8, requires_grad=True)).sum().backward()
            with Products() as products:
                layer(torch.randn(4, 8)).sum().backward()
        assert products.forwards == times


class Products(TorchDispatchMode):
    forwards = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.forwards += func is torch.ops.aten.addmm.default
        return func(*args, **(kwargs or {}))


def test_keeps_at_most_the_bytes_of_the_choice():
    """Products inside of a layer may get more rows than when they were chosen, as experts do."""
    layer, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(4, 8)), torch.ones(16, 8)
    for most, kept in [(16 * 20 * 4, [0, 1, 2]), (16 * 12 * 4, [0, 1]), (16 * 8 * 4, [0]), (16 * 4 * 4, [1])]:
        with LayerRun(frozenset({0, 1, 2}), most) as run:
            layer(x)
        assert list(run.kept) == kept
