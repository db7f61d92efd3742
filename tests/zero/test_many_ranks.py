"""What a rank does for a layer is as many operations for any number of ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_hybrid.params import store
from lightning_hybrid.zero.group import ParameterGroup
from lightning_hybrid.zero.messages import GradientMessages
from lightning_hybrid.zero.ranks import ShardRanks, shard_placement

SHAPES = {"matrix": (192, 3), "wide": (3, 256), "uneven": (131, 2), "short": (5,), "number": ()}


class CountsOperations(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(params=[8, 64])
def layer(request):
    """Ranks of a shard, and the placements and full tensors of a layer."""
    size = request.param
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    full = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    placements = {name: shard_placement(tensor.shape, size) for name, tensor in full.items()}
    ranks = ShardRanks(dist.group.WORLD, dist.new_group([0]))
    yield ranks, {name: each for name, each in placements.items() if each is not None}, full
    dist.destroy_process_group()


def test_gradients_are_written_in_few_operations(layer):
    ranks, placements, full = layer
    size = ranks.shard.size()
    local = {
        name: placements[name].view(t, 0, size).shape if name in placements else t.shape for name, t in full.items()
    }
    messages = GradientMessages(local, placements, ranks, sparse=())
    messages.begin(list(full), torch.empty(0))
    with CountsOperations() as operations:
        for name, gradient in full.items():
            messages.write(name, gradient)
    assert operations.count < 20 * len(full)
    for name, gradient in full.items():
        for rank in range(size):
            shard = placements[name].view(gradient, rank, size) if name in placements else gradient
            row = messages._message[rank, messages._offsets[name] :][: shard.numel()]
            torch.testing.assert_close(row.view(shard.shape), shard / size, rtol=0, atol=1e-7)


def test_parameters_are_read_in_few_operations(layer):
    ranks, placements, full = layer
    size = ranks.shard.size()
    parameters = {name: nn.Parameter(full[name]) for name in placements}
    for name, parameter in parameters.items():
        store.shard(parameter, placements[name].view(full[name], 0, size).clone())
    group = ParameterGroup("layer", parameters, placements, ranks, keeps_full=False)
    received = torch.zeros(size, group._row_numel)
    for name, placement in placements.items():
        for rank in range(size):
            shard = placement.view(full[name], rank, size)
            received[rank, group._offsets[name] :][: shard.numel()] = shard.flatten()
    with CountsOperations() as operations:
        for name in placements:
            group._unpack(name, received.view(-1))
    assert operations.count < 20 * len(placements)
    for name in placements:
        assert torch.equal(group.full_parameter(name), full[name])
