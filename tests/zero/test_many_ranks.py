"""What a rank does for a layer is as many operations for any number of ranks."""

import contextlib
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_hybrid.host_copies import HostReads
from lightning_hybrid.params import store
from lightning_hybrid.zero.group import ParameterGroup
from lightning_hybrid.zero.messages import GradientMessages
from lightning_hybrid.zero.ranks import ShardRanks, shard_placement

SHAPES = {"matrix": (192, 3), "wide": (3, 256), "uneven": (131, 2), "short": (5,), "number": ()}
# A layer of a decoder: rows of all of its tensors are shards.
LAYER = {name: (512,) for name in ("norm", "other_norm")} | {
    **{name: (512, 2) for name in ("q", "k", "v", "o")},
    **{name: (1024, 2) for name in ("gate", "up")},
    "down": (512, 4),
}


class CountsOperations(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def ranks_of(size):
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    yield ShardRanks(dist.group.WORLD, dist.new_group([0]))
    dist.destroy_process_group()


def placements_of(full, size):
    found = {name: shard_placement(tensor.shape, size) for name, tensor in full.items()}
    return {name: each for name, each in found.items() if each is not None}


def group_of(full, ranks):
    size = ranks.shard.size()
    placements = placements_of(full, size)
    parameters = {name: nn.Parameter(full[name]) for name in placements}
    for name, parameter in parameters.items():
        store.shard(parameter, placements[name].view(full[name], 0, size).clone())
    return ParameterGroup("layer", parameters, placements, ranks, keeps_full=False)


@pytest.fixture(params=[8, 64])
def layer(request):
    """Ranks of a shard, and the placements and full tensors of a layer."""
    full = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    with ranks_of(request.param) as ranks:
        yield ranks, placements_of(full, request.param), full


@pytest.mark.parametrize("names", [[*SHAPES], ["matrix"]], ids=["all shapes", "rows"])
def test_gradients_are_written_in_few_operations(layer, names):
    ranks, placements, full = layer
    size, full = ranks.shard.size(), {name: full[name] for name in names}
    local = {
        name: placements[name].view(t, 0, size).shape if name in placements else t.shape for name, t in full.items()
    }
    messages = GradientMessages(local, placements, ranks, sparse=())
    messages.begin(list(full), torch.empty(0))
    with CountsOperations() as operations:
        messages.write(full)
    assert operations.count < 20 * len(full)
    for name, gradient in full.items():
        for rank in range(size):
            shard = placements[name].view(gradient, rank, size) if name in placements else gradient
            row = messages._message[rank, messages._rows.offsets[name] :][: shard.numel()]
            torch.testing.assert_close(row.view(shard.shape), shard / size, rtol=0, atol=1e-7)
    assert messages._message[:, -len(full) :].eq(1).all()


def test_parameters_are_read_in_few_operations(layer):
    ranks, placements, full = layer
    size, group = ranks.shard.size(), group_of(full, ranks)
    received = torch.zeros(size, group._row_numel)
    for name, placement in placements.items():
        for rank in range(size):
            shard = placement.view(full[name], rank, size)
            received[rank, group._rows.offsets[name] :][: shard.numel()] = shard.flatten()
    with CountsOperations() as operations:
        group._unpack(received)
    assert operations.count < 20 * len(placements)
    for name in placements:
        assert torch.equal(group.full_parameter(name), full[name])


def run_layer(group, gradients):
    """Gather a layer, free it, and reduce its gradients."""
    group.launch_gather()
    group.gather()
    for name, gradient in gradients.items():
        group.parameters[name].grad = gradient
    group.launch_reduce()
    group.receive_reduced()
    reads = HostReads()
    group.complete_reduce(reads)
    group.finish_reduce()
    group.free()
    group.reshard()
    for parameter in group.parameters.values():
        parameter.grad = None


def counts(size):
    """Operations of torch for a layer, and calls of Python functions."""
    full = {name: torch.randn(shape) for name, shape in LAYER.items()}
    calls = 0

    def count_call(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    with ranks_of(size) as ranks:
        group = group_of(full, ranks)
        group.train(list(full))
        run_layer(group, full)
        with CountsOperations() as operations:
            run_layer(group, full)
        sys.setprofile(count_call)
        try:
            run_layer(group, full)
        finally:
            sys.setprofile(None)
    return operations.count, calls


def test_a_layer_costs_as_much_at_512_ranks_as_at_8():
    (few_operations, few_calls), (many_operations, many_calls) = counts(8), counts(512)
    assert many_operations <= few_operations <= 12 * len(LAYER)
    assert many_calls <= 1.05 * few_calls <= 140 * len(LAYER)
