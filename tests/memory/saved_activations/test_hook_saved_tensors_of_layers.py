"""Saved tensors of layers in one process: what is stored, exact gradients, errors, in-place writes, the file."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from harness.live_storages import LiveStorages
from lightning_hybrid.errors import OffloadError
from lightning_hybrid.memory.saved_activations.layer_activations import LayerActivations, Moving
from lightning_hybrid.memory.saved_activations.places import ActivationFile
from lightning_hybrid.memory.saved_activations.requests import Compression

CPU = torch.device("cpu")


@pytest.fixture
def file(tmp_path):
    file = ActivationFile(tmp_path)
    yield file
    file.close()


def activations_of(layers, *, file=None, bits=None, share=1.0, min_bytes=0, key=lambda: (1, 1)):
    compression = None if bits is None else Compression(bits, min_bytes)
    moving = None if file is None else Moving(file, min_bytes, dict.fromkeys(layers, share))
    return LayerActivations(layers, CPU, compression=compression, moving=moving, microbatch_key=key)


def gradients(module, activations, batch, *, loss=lambda out: out.square().mean()):
    """Of the parameters, of a module that is one layer."""
    torch.manual_seed(3)
    module.zero_grad()
    if activations is None:
        out = loss(module(batch))
    else:
        with activations.running():
            out = loss(module(batch))
    out.backward()
    return [parameter.grad.clone() for parameter in module.parameters()]


def assert_same(one, other):
    assert len(one) == len(other) > 0
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def mlp(width=64):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.LayerNorm(4 * width), nn.Linear(4 * width, width))


def test_offload_is_exact_and_counts_each_storage_once(file):
    module, batch = mlp(), torch.randn(32, 64)
    activations = activations_of({"": module}, file=file)
    assert_same(gradients(module, None, batch), gradients(module, activations, batch))
    # Results of the first linear, GELU and the norm, and two statistics; the batch and weights stay.
    assert activations.bytes.saved == 4 * (3 * 32 * 256 + 2 * 32) and activations.bytes.on_device == 0


def test_offloaded_memory_is_free_until_the_backward(file):
    """No more than what is on its way to the file."""
    module, batch = nn.Sequential(*(mlp(256) for _ in range(3))), torch.randn(64, 256)
    layers = dict(module.named_children())

    def saved(activations):
        with LiveStorages() as live, activations.running():
            loss = module(batch).square().mean()
        file.drain()
        for parameter in module.parameters():
            live.made.pop(parameter.untyped_storage()._cdata, None)
        at_backward = live.bytes()
        loss.backward()
        return at_backward

    assert saved(activations_of(layers, file=file)) < 0.3 * saved(activations_of(layers))


def test_space_in_the_file_is_reused(file):
    module, batch = mlp(), torch.randn(32, 64)
    activations = activations_of({"": module}, file=file)
    with activations.running():
        loss = module(batch).sum()
    file.drain()
    end = file._end  # all of one step
    loss.backward()
    for _ in range(10):
        gradients(module, activations, batch)
    assert 0 < end <= file._end <= 2 * end  # a write may end after its tensor was taken from memory


class Shared(nn.Module):
    """Views of one storage, and one tensor in several operations."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.qkv = nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, 16)).transpose(0, 1) for part in self.qkv(x).chunk(3, dim=-1))
        out = F.scaled_dot_product_attention(q[None], k[None], v[None])
        return out.exp() * out.sin()


@pytest.mark.parametrize("bits", [None, 8])
def test_views_share_one_copy(file, bits):
    module, batch = Shared(), torch.randn(24, 32)
    activations = activations_of({"": module}, file=file, bits=bits)
    exact, stored = gradients(module, None, batch), gradients(module, activations, batch)
    # One storage for the three, the statistic and the result of the attention, results of exp and sin.
    assert activations.bytes.saved == 4 * (24 * 96 + 2 * 24 + 3 * 24 * 32)
    if bits is None:
        assert_same(exact, stored)
    else:
        torch.testing.assert_close(stored, exact, rtol=0.1, atol=0.02)


@pytest.mark.parametrize("bits", [8, 1])
@pytest.mark.parametrize("inplace", [False, True])
def test_relu_dropout_and_pooling_are_exact(bits, inplace):
    """Gradients of a layer before them have the same bits: sign, mask and indices are all that they need."""
    torch.manual_seed(1)

    class Exact(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.randn(8, 1, 1))

        def forward(self, x):
            x = F.relu(x + self.scale, inplace=inplace)  # the sum saves nothing
            x = F.max_pool2d(F.dropout(x, 0.4), 2)
            return x + F.dropout(x, 0.3)

    module, batch = Exact(), torch.randn(4, 8, 16, 16)
    activations = activations_of({"": module}, bits=bits)
    loss = lambda out: (out * torch.arange(8.0)).sum()  # noqa: E731
    assert_same(gradients(module, None, batch, loss=loss), gradients(module, activations, batch, loss=loss))
    assert activations.bytes.saved > 7 * activations.bytes.on_device


def test_the_sign_of_relu_is_not_its_value():
    """A linear after ReLU, in another layer or not, needs the values; they are rounded, not replaced by signs."""
    torch.manual_seed(1)
    relu, linear = nn.Sequential(nn.Linear(64, 256), nn.ReLU()), nn.Linear(256, 16)
    both, batch = nn.Sequential(relu, linear), torch.randn(128, 64)
    exact = gradients(both, None, batch)
    for layers in ({"": both}, {"0": relu, "1": linear}, {"1": linear}):
        stored = gradients(both, activations_of(layers, bits=8), batch)
        assert_same(exact[-1:], stored[-1:])  # the bias of the linear needs no value
        for a, b in zip(exact, stored, strict=True):
            assert float((a - b).norm() / a.norm()) < 0.01


@pytest.mark.parametrize(("bits", "bound"), [(8, 0.01), (4, 0.2), (2, 1.0)])
def test_rounded_gradients_and_their_measured_error(bits, bound):
    module, batch = mlp(), torch.randn(128, 64)
    activations = activations_of({"": module}, bits=bits)
    exact = gradients(module, None, batch)
    activations.error.request()
    rounded = gradients(module, activations, batch)
    error = sum(float((a - b).double().square().sum()) for a, b in zip(exact, rounded, strict=True))
    total = sum(float(a.double().square().sum()) for a in exact)
    assert 0.01 * bound < (error / total) ** 0.5 < bound
    assert activations.error.sums == pytest.approx([error, total], rel=1e-4)
    assert 27 / bits < activations.bytes.saved / activations.bytes.on_device < 32 / bits
    assert_same(rounded, gradients(module, activations_of({"": module}, bits=bits), batch))


def test_measured_layers_keep_nothing_exact_afterwards():
    module, batch = mlp(), torch.randn(128, 64)
    activations = activations_of({"": module}, bits=8)
    activations.error.request()
    gc.collect()
    with LiveStorages() as live:
        gradients(module, activations, batch)
    assert live.count(4 * 128 * 256) == 0


def test_log_softmax_and_statistics_are_exact():
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.bias = nn.Parameter(torch.randn(64))

        def forward(self, x):
            return F.log_softmax(x + self.bias, dim=-1)

    module, batch = Head(), torch.randn(256, 64) * 10
    loss = lambda out: F.nll_loss(out, torch.arange(256) % 64)  # noqa: E731
    activations = activations_of({"": module}, bits=2)
    assert_same(gradients(module, None, batch, loss=loss), gradients(module, activations, batch, loss=loss))


@pytest.mark.parametrize("bits", [None, 8])
def test_a_write_to_a_saved_tensor_is_detected(file, bits):
    """As torch does without hooks; where the copy is complete before the write, the gradient is right."""

    class Written(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(50))

        def forward(self, x):
            y = x * self.weight
            out = y.sin()
            y += 1
            return out

    module, batch = Written(), torch.randn(10, 50)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(module, None, batch)
    if bits is None:
        for kept in (activations_of({"": module}, file=file, min_bytes=1 << 20), None):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                gradients(module, kept, batch)
    else:
        expected = (batch * batch.cos() * 2 * batch.sin()).sum(0) / batch.numel()
        [found] = gradients(module, activations_of({"": module}, bits=8), batch)
        torch.testing.assert_close(found, expected, rtol=0.05, atol=1e-3)


def test_checkpoints_inside_and_outside_of_a_layer(file):
    class Checkpointed(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return checkpoint(self.inner, x * 2, use_reentrant=False)

    inner, batch = mlp(), torch.randn(32, 64)
    module = Checkpointed(inner)
    exact = gradients(module, None, batch)
    for layers in ({"inner": inner}, {"": module}, {"inner.1": inner[1], "inner.2": inner[2]}):
        assert_same(exact, gradients(module, activations_of(layers, file=file), batch))


def test_double_backward_and_two_backwards(file):
    module, x = mlp(), torch.randn(8, 64, requires_grad=True)

    def second(activations):
        module.zero_grad()
        with activations.running():
            out = module(x).sin().sum()
        [first] = torch.autograd.grad(out, x, create_graph=True)
        first.square().sum().backward(retain_graph=True)
        first.square().sum().backward()
        return [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]

    assert_same(second(activations_of({})), second(activations_of({"": module}, file=file)))


def test_a_layer_without_a_backward_is_freed(file):
    module = mlp()
    activations = activations_of({"": module}, file=file)
    with activations.running():
        out = module(torch.randn(8, 64))
    node = weakref.ref(out)
    del out
    gc.collect()
    file.drain()
    assert node() is None and not len(activations._stored)


def test_a_truncated_file_is_an_error(file):
    module, batch = mlp(), torch.randn(32, 64)
    activations = activations_of({"": module}, file=file)
    with activations.running():
        loss = module(batch).sum()
    file.drain()
    file._file.truncate(0)
    with pytest.raises(OffloadError, match=r"bytes are missing in its file, which was truncated"):
        loss.backward()
