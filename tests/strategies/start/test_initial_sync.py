"""All ranks start with the weights of the first one, of any dtype and size."""

import pytest
import torch
from torch import nn

from lightning_hybrid.layout import ParallelLayout
from lightning_hybrid.mesh import Mesh
from lightning_hybrid.strategies.start.initial_sync import synchronize_start


class Mixed(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.small = nn.ModuleList(nn.Linear(3, 2) for _ in range(300))  # more than travel together
        self.wide = nn.Parameter(torch.randn(300, 300))
        self.columns = nn.Parameter(torch.randn(4, 3, dtype=torch.float64).t())
        with torch.inference_mode():
            self.register_buffer("seen", torch.rand(5))
        self.register_buffer("mask", torch.rand(2, 7) > 0.5)
        self.register_buffer("switch", torch.tensor(seed == 0))
        self.register_buffer("count", torch.tensor(seed))
        self.register_buffer("none", torch.empty(0))
        self.register_buffer("short", torch.tensor([seed, 7], dtype=torch.int16))
        self.register_buffer("waves", torch.randn(70_000, dtype=torch.complex64))


@pytest.mark.world(2)
def test_every_tensor_equals_that_of_rank_0():
    mesh = Mesh.build(ParallelLayout(data_replicate_size=2), "cpu")
    module, expected = Mixed(seed=mesh.rank), Mixed(seed=0)
    places = [tensor.data_ptr() for tensor in module.state_dict().values()]
    torch.manual_seed(5 + mesh.rank)
    seed = synchronize_start(module, mesh, mesh.rank, torch.device("cpu"))
    assert seed == 5
    for (name, tensor), first in zip(module.state_dict().items(), expected.state_dict().values(), strict=True):
        assert torch.equal(tensor, first), name
        assert tensor.stride() == first.stride(), name
    assert [tensor.data_ptr() for tensor in module.state_dict().values()] == places


@pytest.mark.world(2)
def test_layers_without_shapes_are_refused():
    mesh = Mesh.build(ParallelLayout(data_replicate_size=2), "cpu")
    module = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3))
    with pytest.raises(ValueError, match=r"1\.weight of a lazy layer has no shape before the first batch"):
        synchronize_start(module, mesh, mesh.rank, torch.device("cpu"))
