"""Saved tensors offloaded from a GPU: the same bits, and memory that is free between forward and backward."""

import pytest
import torch
from torch import nn

from lightning_hybrid.memory.saved_activations.layer_activations import LayerActivations, Moving
from lightning_hybrid.memory.saved_activations.places import ActivationFile, HostMemory
from lightning_hybrid.memory.saved_activations.requests import Compression

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.world(1, timeout=120),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs 1 CUDA device(s)"),
]


def step(module, batch, activations):
    """Gradients, and the bytes that are allocated when the backward begins."""
    module.zero_grad(set_to_none=True)
    with activations.running():
        loss = module(batch).square().mean()
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_allocated()
    loss.backward()
    return [parameter.grad.clone() for parameter in module.parameters()], allocated


@pytest.mark.parametrize("to", ["host", "file"])
@pytest.mark.parametrize("bits", [None, 8])
def test_offload_gives_the_same_bits(tmp_path, to, bits):
    torch.manual_seed(1)
    device = torch.device("cuda", 0)
    blocks = [nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512), nn.LayerNorm(512)) for _ in range(8)]
    module, batch = nn.Sequential(*blocks).to(device), torch.randn(4096, 512, device=device)
    layers = dict(module.named_children())
    place = HostMemory(device) if to == "host" else ActivationFile(tmp_path, HostMemory(device))
    compression = None if bits is None else Compression(bits, 4096)
    options = {"compression": compression, "microbatch_key": lambda: (1, 1)}
    stays = LayerActivations(layers, device, moving=None, **options)
    moves = LayerActivations(layers, device, moving=Moving(place, 65536, dict.fromkeys(layers, 1.0)), **options)
    for _ in range(3):
        expected, before = step(module, batch, stays)
        found, after = step(module, batch, moves)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert after < before
    if to == "file":
        place.close()
