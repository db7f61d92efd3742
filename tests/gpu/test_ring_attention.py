"""Ring attention with torch's kernels for CUDA, on threads as ranks of one GPU, against float64.

The forward alone: one thread runs all backwards of a device, so that one rank's would wait for another's. Fits with two
ranks on a device in `test_on_gpus.py` run both.
"""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from harness.thread_ranks import on_ranks
from lightning_hybrid.sequence.kernels import (
    EfficientOnCuda,
    FlashOnCuda,
    MatrixProducts,
    kernel_for,
)
from lightning_hybrid.sequence.positions import (
    SequenceSharding,
    gather_sequence,
    local_positions,
)
from lightning_hybrid.sequence.ring import ring_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.world(1, timeout=120),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs 1 CUDA device(s)"),
]

DTYPES = {
    torch.bfloat16: (FlashOnCuda, 2e-2),
    torch.float16: (FlashOnCuda, 3e-3),
    torch.float32: (EfficientOnCuda, 1e-5),
    torch.float64: (MatrixProducts, 1e-10),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["full", "causal", "mask"])
@pytest.mark.parametrize("length", [192, 203])
def test_parity(dtype, kind, length):
    torch.manual_seed(0)
    kernel, tolerance = DTYPES[dtype]
    mask = torch.rand(2, 1, length, length, device="cuda") > 0.5 if kind == "mask" else None
    if mask is not None:
        mask[0, 0, 1] = False  # a query without any key
        mask[..., 2, : length // 2] = False
        kernel = EfficientOnCuda if kernel is FlashOnCuda else kernel
    is_causal = kind == "causal"
    shapes = (2, 6, length, 32), (2, 2, length, 32), (2, 2, length, 32)
    inputs = [torch.randn(shape, dtype=torch.float64, device="cuda").to(dtype) for shape in shapes]
    assert isinstance(kernel_for(inputs[0], inputs[2], mask), kernel)
    exact = [tensor.double() for tensor in inputs]
    wanted = scaled_dot_product_attention(*exact, attn_mask=mask, is_causal=is_causal, enable_gqa=True)
    masks = () if mask is None else (mask,)

    def run(ranks):
        sharding = SequenceSharding(2, length, ranks)
        local = [local_positions(tensor, sharding) for tensor in inputs]
        return gather_sequence(ring_attention(*local, sharding, masks=masks, is_causal=is_causal), sharding)

    for out in on_ranks(3, run):
        assert (out.double() - wanted).norm() / wanted.norm() < tolerance
