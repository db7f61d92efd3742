"""Ring attention on threads as ranks, against the attention of one process: outputs and all gradients to 1e-10."""

import itertools

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from harness.thread_ranks import on_ranks
from lightning_hybrid.errors import CannotShard
from lightning_hybrid.sequence.kernels import (
    FlashOnCpu,
    MatrixProducts,
    Scores,
    kernel_for,
    merge_block,
)
from lightning_hybrid.sequence.order import RingOrder, contiguous_ranges
from lightning_hybrid.sequence.positions import (
    SequenceSharding,
    gather_sequence,
    local_positions,
)
from lightning_hybrid.sequence.ring import ring_attention
from lightning_hybrid.tensor.collectives import Ranks

CLOSE = {"rtol": 1e-10, "atol": 1e-12}


def masks_of(kind, length, heads):
    """Arguments of torch's attention, and those of the ring."""
    if kind == "causal":
        return {"is_causal": True}
    if kind == "boolean":
        mask = torch.rand(2, 1, length, length) > 0.4
        mask[0, 0, 1] = False  # a query without any key
        return {"attn_mask": mask}
    if kind == "padding":
        mask = torch.ones(2, 1, 1, length, dtype=torch.bool)
        mask[0, ..., : length // 2] = False  # the keys of several ranks, all of them
        return {"attn_mask": mask}
    if kind == "bias":
        return {"attn_mask": torch.randn(heads, length, length, dtype=torch.float64, requires_grad=True)}
    if kind == "bias of keys":
        return {"attn_mask": torch.randn(2, 1, 1, length, dtype=torch.float64, requires_grad=True)}
    return {}


def differentiated(out, inputs):
    weights = torch.sin(torch.arange(out.numel(), dtype=out.dtype)).view(out.shape)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), inputs)]


KINDS = ["full", "causal", "boolean", "padding", "bias", "bias of keys"]


@pytest.mark.parametrize(("size", "length"), [(1, 7), (2, 8), (3, 13), (4, 11), (5, 32), (2, 3), (3, 3), (3, 4)])
@pytest.mark.parametrize("kind", KINDS)
def test_parity_with_one_process(kind, size, length):
    torch.manual_seed(0)
    shapes = {"q": (2, 6, length, 8), "k": (2, 2, length, 8), "v": (2, 2, length, 8 if size % 2 else 12)}
    q, k, v = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes.values())
    options = {**masks_of(kind, length, 6), "scale": 0.4}
    mask = options.get("attn_mask")
    inputs = [q, k, v, *([mask] if mask is not None and mask.requires_grad else [])]
    wanted = differentiated(scaled_dot_product_attention(q, k, v, enable_gqa=True, **options), inputs)

    def run(ranks):
        own = [tensor.detach().requires_grad_() for tensor in inputs]
        sharding = SequenceSharding(2, length, ranks)
        local = [local_positions(tensor, sharding) for tensor in own[:3]]
        masks = () if mask is None else tuple(own[3:] or [mask])
        out = ring_attention(*local, sharding, masks=masks, is_causal=kind == "causal", scale=0.4)
        return own, gather_sequence(out, sharding)

    found = on_ranks(size, run)
    grads = on_ranks(size, lambda ranks: differentiated(found[ranks.rank][1], found[ranks.rank][0]))
    for rank in grads:
        for tensor, expected in zip(rank, wanted, strict=True):
            torch.testing.assert_close(tensor, expected, **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_is_that_of_the_dtype(dtype):
    torch.manual_seed(0)
    inputs = [torch.randn(2, 3, 24, 8, dtype=torch.float64).to(dtype) for _ in range(3)]
    exact = [tensor.double().requires_grad_() for tensor in inputs]
    wanted = differentiated(scaled_dot_product_attention(*exact, is_causal=True), exact)

    def run(ranks):
        own = [tensor.detach().requires_grad_() for tensor in inputs]
        sharding = SequenceSharding(2, 24, ranks)
        local = [local_positions(tensor, sharding) for tensor in own]
        return own, gather_sequence(ring_attention(*local, sharding, is_causal=True), sharding)

    found = on_ranks(3, run)
    for rank in on_ranks(3, lambda ranks: differentiated(found[ranks.rank][1].double(), found[ranks.rank][0])):
        for tensor, expected in zip(rank, wanted, strict=True):
            error = (tensor.double() - expected).norm() / expected.norm()
            assert error < 2 * torch.finfo(dtype).eps


def test_autocast_is_that_of_torch():
    tensors = [torch.randn(1, 2, 8, 8) for _ in range(3)]
    with torch.autocast("cpu", torch.bfloat16):
        out = ring_attention(*tensors, SequenceSharding(2, 8, Ranks()), is_causal=True)
        assert out.dtype is scaled_dot_product_attention(*tensors, is_causal=True).dtype is torch.bfloat16


@pytest.mark.parametrize("kernel", [MatrixProducts(), FlashOnCpu()], ids=lambda kernel: type(kernel).__name__)
@pytest.mark.parametrize("is_causal", [False, True])
def test_kernels_give_gradients_of_a_block_from_the_log_sum_exp_of_all(kernel, is_causal):
    """Two blocks of keys, the first one causal, against torch's attention to both."""
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(1, 2, length, 8, dtype=torch.float64) for length in (4, 8, 8, 4))
    inputs = [tensor.requires_grad_() for tensor in (q, k, v)]
    mask = torch.ones(4, 8, dtype=torch.bool).tril(4 if is_causal else 8)
    full = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3)
    wanted = torch.autograd.grad(full, inputs, grad)
    with torch.no_grad():
        blocks = [(k[:, :, :4], v[:, :, :4], Scores(0.3)), (k[:, :, 4:], v[:, :, 4:], Scores(0.3, is_causal))]
        (out, lse), (other, other_lse) = (kernel.forward(q, *block) for block in blocks)
        merge_block(out, lse, other, other_lse)
        torch.testing.assert_close(out, full, **CLOSE)
        grads = [kernel.backward(grad, q, *block[:2], out, lse, block[2]) for block in blocks]
        torch.testing.assert_close(grads[0][0] + grads[1][0], wanted[0], **CLOSE)
        for index in (1, 2):
            torch.testing.assert_close(torch.cat([each[index] for each in grads], 2), wanted[index], **CLOSE)


def test_flash_kernel_where_it_can_be_used():
    q, mask = torch.randn(1, 2, 4, 8), torch.zeros(4, 4)
    assert isinstance(kernel_for(q, q, None), FlashOnCpu)
    assert isinstance(kernel_for(q, q[..., :4], None), MatrixProducts)
    assert isinstance(kernel_for(q, q, mask.requires_grad_()), MatrixProducts)


def num_scores(order, rank):
    """Pairs of a query and a key that a rank computes; half of those in a causal block."""
    total = 0.0
    for other in range(order.size):
        block = order.block(rank, other)
        queries = len(range(order.num_positions(rank))[block.queries])
        keys = len(range(order.num_positions(other))[block.keys])
        total += queries * (keys + 1) / 2 if block.is_causal else queries * keys
    return int(total)


@pytest.mark.parametrize(("length", "size"), [(8, 2), (13, 3), (64, 4), (1000, 7)])
def test_every_pair_is_computed_once(length, size):
    for is_causal in (False, True):
        order = RingOrder(length, size, is_causal)
        positions = [torch.cat([torch.arange(*each) for each in order.ranges(rank)]) for rank in range(size)]
        assert torch.equal(torch.cat(positions).sort().values, torch.arange(length))
        seen = torch.zeros(length, length, dtype=torch.int)
        for rank, other in itertools.product(range(size), repeat=2):
            block = order.block(rank, other)
            queries, keys = positions[rank][block.queries], positions[other][block.keys]
            pairs = torch.ones(len(queries), len(keys), dtype=torch.int)
            seen[queries[:, None], keys] += pairs.tril() if block.is_causal else pairs
        wanted = torch.ones(length, length, dtype=torch.int)
        assert torch.equal(seen, wanted.tril() if is_causal else wanted)
        if length % (2 * size) == 0:
            assert len({num_scores(order, rank) for rank in range(size)}) == 1


def test_contiguous_ranges_are_those_of_the_sharding():
    class Five(Ranks):
        size = 5

    lengths = SequenceSharding(0, 13, Five()).lengths
    assert [stop - start for [(start, stop)] in contiguous_ranges(13, 5)] == lengths


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"masks": (torch.ones(4, 4),)}, "has not the 8 positions of all context ranks"),
        ({"masks": (torch.ones(8, 8),), "is_causal": True}, "a mask or is_causal"),
    ],
)
def test_refusals(options, message):
    class Two(Ranks):
        size = 2

    with pytest.raises(CannotShard, match=message):
        ring_attention(*torch.randn(3, 1, 2, 4, 8), SequenceSharding(2, 8, Two()), **options)
