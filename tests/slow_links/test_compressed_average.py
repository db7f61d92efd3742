"""Compressed averages: torch's DDP hooks as the oracle, and the identity of error feedback for each method."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from harness.reducer_steps import mean_over_ranks
from lightning_hybrid.replicate.reducer import GradientReducer
from lightning_hybrid.slow_links.average import CompressedAverage
from lightning_hybrid.slow_links.method import Traffic
from lightning_hybrid.slow_links.power_sgd import PowerSGD
from lightning_hybrid.slow_links.quantized import Int8, LowPrecision, OneBit, TopK

SHAPES = {"a": (24, 16), "b": (24,), "c": (16, 3, 8), "d": (4, 2), "e": (24, 16)}
SEED = 7
METHODS = {
    "powersgd": lambda: PowerSGD(Traffic(), 2),
    "powersgd, cold start": lambda: PowerSGD(Traffic(), 2, warm_start=False),
    "int8": lambda: Int8(Traffic()),
    "topk": lambda: TopK(Traffic(), 0.1),
    "1bit": lambda: OneBit(Traffic()),
}


class Bucket:
    """What a DDP hook reads of a `GradBucket`."""

    def __init__(self, flat):
        self.flat = flat

    def buffer(self):
        return self.flat

    def index(self):
        return 0

    def is_last(self):
        return True

    def gradients(self):
        pieces = self.flat.split([int(np.prod(shape)) for shape in SHAPES.values()])
        return [piece.view(shape) for piece, shape in zip(pieces, SHAPES.values(), strict=True)]


def gradients(step, rank=None, dtype=torch.float64):
    generator = torch.Generator().manual_seed(100 * step + (dist.get_rank() if rank is None else rank))
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in SHAPES.values()]


def flags():
    return torch.ones(len(SHAPES) + 1)


def averaged(average, local):
    """The average of the local gradients of all ranks."""
    divided = [gradient / dist.get_world_size() for gradient in local]
    average.launch(list(SHAPES), divided, flags()).wait()
    return divided


def draws_of_torch():
    """The random matrices that `powerSGD_hook` begins with, in its order."""
    generator = torch.Generator().manual_seed(np.random.RandomState(SEED).randint(1_000_000_000))
    return lambda name, columns, rank: torch.randn(1, columns, rank, generator=generator, dtype=torch.float64)[0]


@pytest.mark.world(2)
@pytest.mark.parametrize(("rank", "min_rate"), [(1, 2.0), (4, 1.0), (3, 0.5)])
def test_powersgd_equals_the_hook_of_torch_step_by_step(rank, min_rate):
    state = PowerSGDState(None, rank, start_powerSGD_iter=2, min_compression_rate=min_rate, random_seed=SEED)
    step = 0
    method = PowerSGD(Traffic(), rank, min_compression_rate=min_rate, draw=draws_of_torch())
    average = CompressedAverage(method, dist.group.WORLD, is_compressing=lambda: step >= 2)
    num_lossy = 0
    for step in range(6):
        local = gradients(step)
        bucket = Bucket(torch.cat([gradient.reshape(-1) for gradient in local]))
        powerSGD_hook(state, bucket).wait()
        exact = [sum(all_ranks) / 2 for all_ranks in zip(gradients(step, 0), gradients(step, 1), strict=True)]
        found = averaged(average, local)
        for name, own, torchs, true in zip(SHAPES, found, bucket.gradients(), exact, strict=True):
            torch.testing.assert_close(own, torchs, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
            num_lossy += not torch.allclose(own, true)
    assert num_lossy >= 4 * 2, "nothing was compressed"


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("dtype", "hook"),
    [(torch.float16, default_hooks.fp16_compress_hook), (torch.bfloat16, default_hooks.bf16_compress_hook)],
    ids=["fp16", "bf16"],
)
def test_half_precision_equals_the_hook_of_torch(dtype, hook):
    local = gradients(0, dtype=torch.float32)
    bucket = Bucket(torch.cat([gradient.reshape(-1) for gradient in local]))
    hook(dist.group.WORLD, bucket).wait()
    found = averaged(CompressedAverage(LowPrecision(Traffic(), dtype), dist.group.WORLD), local)
    for own, torchs in zip(found, bucket.gradients(), strict=True):
        assert torch.equal(own, torchs)
    assert not torch.equal(found[0], (gradients(0, 0, torch.float32)[0] + gradients(0, 1, torch.float32)[0]) / 2)


@pytest.mark.world(3)
@pytest.mark.parametrize("method", METHODS)
def test_results_and_feedback_add_up_to_all_gradients(method):
    average = CompressedAverage(METHODS[method](), dist.group.WORLD)
    given = applied = pending = 0
    for step in range(4):
        found = averaged(average, gradients(step))
        exact = [sum(all_ranks) / 3 for all_ranks in zip(*(gradients(step, rank) for rank in range(3)), strict=True)]
        assert torch.equal(found[1], exact[1]) or torch.allclose(found[1], exact[1], rtol=1e-12), "a vector"
        assert not torch.allclose(found[0], exact[0], rtol=1e-3)
        given, applied = given + exact[0], applied + found[0]
        pending = average.errors["a"].clone()
        dist.all_reduce(pending)
        torch.testing.assert_close(applied + pending, given, rtol=1e-6, atol=1e-6)
        same = found[0].clone()
        dist.broadcast(same, 0)
        assert torch.equal(same, found[0]), "the ranks have different results"


@pytest.mark.world(2)
@pytest.mark.parametrize("method", METHODS)
def test_gradients_in_float32_are_shorter_than_a_block(method):
    average = CompressedAverage(METHODS[method](), dist.group.WORLD)
    found = averaged(average, gradients(0, dtype=torch.float32))
    pending = average.errors["a"].clone()
    dist.all_reduce(pending)
    exact = sum(gradients(0, rank, torch.float32)[0] for rank in range(2)) / 2
    torch.testing.assert_close(found[0] + pending, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.world(2)
@pytest.mark.parametrize("method", METHODS)
def test_a_gradient_that_repeats_is_learned_from_feedback(method):
    """The mean of the results over many steps comes as near to the gradient as a last message may be away."""
    average = CompressedAverage(METHODS[method](), dist.group.WORLD)
    local = gradients(0)
    exact = sum(gradients(0, rank)[0] for rank in range(2)) / 2
    total = sum(averaged(average, local)[0] for _ in range(60)) / 60
    error = float((total - exact).norm() / exact.norm())
    assert error < 0.25, error


@pytest.mark.world(2)
@pytest.mark.parametrize("method", METHODS)
def test_feedback_waits_where_no_rank_has_a_gradient(method):
    average = CompressedAverage(METHODS[method](), dist.group.WORLD)
    averaged(average, gradients(0))
    before = average.errors["a"].clone()
    none = [torch.zeros_like(gradient) for gradient in gradients(0)]
    average.launch(list(SHAPES), none, torch.zeros(len(SHAPES) + 1)).wait()
    torch.testing.assert_close(average.errors["a"], before)


@pytest.mark.world(2)
@pytest.mark.parametrize("method", METHODS)
def test_overflow_on_one_rank_leaves_the_feedback(method):
    average = CompressedAverage(METHODS[method](), dist.group.WORLD)
    averaged(average, gradients(0))
    before = average.errors["a"].clone()
    local = gradients(1)
    if dist.get_rank() == 1:
        local[0][0, 0] = float("inf")
    assert not torch.stack([g.isfinite().all() for g in averaged(average, local)]).all(), "the scaler must see it"
    assert torch.equal(average.errors["a"], before)
    assert all(gradient.isfinite().all() for gradient in averaged(average, gradients(2)))


@pytest.mark.world(2)
@pytest.mark.parametrize("method", METHODS)
def test_feedback_of_all_messages_of_a_skipped_step_is_restored(method):
    """An overflow in one message skips the step of all parameters, so what the others have sent is not used."""
    step, scale = 0, 8.0
    average = CompressedAverage(METHODS[method](), dist.group.WORLD, loss_scale=lambda: scale, step=lambda: step)

    def send(name, gradient):
        average.launch([name], [gradient], torch.ones(2)).wait()

    def send_both(overflows=False):
        first, *_, last = gradients(step)
        if overflows:
            first[0, 0] = float("inf")
        send("a", first)
        send("e", last)

    send_both()
    before = dict(average.errors)
    step = 1
    send_both(overflows=True)
    assert not torch.equal(average.errors["e"], before["e"])
    step, scale = 2, 4.0
    average.settle()
    assert before.keys() == average.errors.keys()
    assert all(torch.equal(average.errors[name], error) for name, error in before.items())
    send_both()
    step, scale = 3, 8.0
    after = dict(average.errors)
    average.settle()
    assert all(average.errors[name] is error for name, error in after.items()), "that step was not skipped"


@pytest.mark.world(2)
def test_feedback_is_kept_without_the_loss_scale():
    scale = 1.0
    average = CompressedAverage(PowerSGD(Traffic(), 2), dist.group.WORLD, loss_scale=lambda: scale)
    other = CompressedAverage(PowerSGD(Traffic(), 2), dist.group.WORLD)
    for step, scale in enumerate((8.0, 4.0, 16.0)):
        scaled = averaged(average, [gradient * scale for gradient in gradients(step)])
        torch.testing.assert_close(scaled[0] / scale, averaged(other, gradients(step))[0])


@pytest.mark.world(2)
def test_bytes_of_each_method():
    """Of a matrix of 256 x 256 float32 over two ranks, whose all-reduce sends as many bytes as it has."""
    numel = 256 * 256
    expected = {
        "powersgd": 4 * 2 * (256 + 256),
        "int8": numel * (1 + 4 / 256),
        "topk": 8 * round(0.1 * numel),
        "1bit": numel * (1 / 8 + 4 / 1024),
    }
    for name, num_bytes in expected.items():
        average = CompressedAverage(METHODS[name](), dist.group.WORLD)
        average.launch(["a"], [torch.randn(256, 256)], torch.ones(2)).wait()
        traffic = average.method.traffic
        assert traffic.uncompressed == 4 * numel
        assert traffic.sent == pytest.approx(num_bytes + 8), name  # and two flags


@pytest.mark.world(2)
def test_reducer_averages_in_compressed_form():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    reducer = GradientReducer(list(model.named_parameters()), dist.group.WORLD, bucket_bytes=500)
    reducer.compress(CompressedAverage(Int8(Traffic()), dist.group.WORLD))
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(dist.get_rank()))
    local = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    exact = [mean_over_ranks(gradient, gradient) for gradient in local]
    reducer.arm()
    model(x).square().sum().backward()
    reducer.finish()
    for parameter, expected in zip(model.parameters(), exact, strict=True):
        assert float((parameter.grad - expected).abs().max()) < 0.02 * float(expected.abs().max())
    assert set(reducer.average.errors) == {"0.weight", "1.weight"}
