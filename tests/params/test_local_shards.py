"""Shards over two nested axes are joined to the full tensor, and a full tensor is unchanged."""

import pytest
import torch
from torch import nn

from lightning_hybrid.layout import ParallelLayout
from lightning_hybrid.mesh import Mesh
from lightning_hybrid.params.placement import Shard
from lightning_hybrid.params.shards import AxisSharding, LocalShards

# By name: the full shape, its sharding over tensor ranks, and that of the rest over shard ranks.
CUTS = {
    "same dim": ((12, 3), Shard.evenly(0, 12, 2), Shard.allowing_empty(0, 6, 2)),
    "uneven inside": ((10, 3), Shard.evenly(0, 10, 2), Shard.allowing_empty(0, 5, 2)),
    "uneven outside": ((3, 5), Shard.unevenly(1, 5, 2), None),
    "other dim": ((12, 3), Shard.evenly(0, 12, 2), Shard.allowing_empty(1, 3, 2)),
    "inner only": ((3, 3), None, Shard.allowing_empty(0, 3, 2)),
    "owned": ((12, 3), Shard.evenly(0, 12, 2), Shard.owned(6, 2, 1)),
    "owned only": ((12, 3), None, Shard.owned(12, 2, 1)),
}


def make_local_shards():
    mesh = Mesh.build(ParallelLayout(tensor_parallel_size=2, data_shard_size=2), "cpu")
    root = nn.ParameterDict({name: nn.Parameter(torch.randn(shape)) for name, (shape, _, _) in CUTS.items()})
    outer = {name: placement for name, (_, placement, _) in CUTS.items() if placement is not None}
    inner = {name: placement for name, (_, _, placement) in CUTS.items() if placement is not None}
    shardings = [
        AxisSharding(mesh.group("tp"), outer, axis="tp"),
        AxisSharding(mesh.group("dp_shard"), inner, axis="dp_shard"),
    ]
    return root, LocalShards(root, shardings), shardings


@pytest.mark.world(4)
def test_shards_of_two_axes_are_joined_once():
    torch.manual_seed(1)
    root, parts, (outer, _) = make_local_shards()
    full = {name: parameter.detach().clone() for name, parameter in root.items()}
    for name, tensor in full.items():
        shard = parts.shard(name, tensor)
        assert torch.equal(parts.unshard(name, shard), tensor), name
        assert torch.equal(parts.unshard(name, tensor), tensor), name
        gathered = outer.shard(tensor, outer.placements[name]) if name in outer.placements else tensor
        assert torch.equal(parts.unshard(name, gathered), tensor), name
        assert torch.equal(parts.unshard(name, shard, over_tensor_ranks=False), gathered), name
    parts.shard_parameters(root)
    parts.unshard_parameters()
    for name, tensor in full.items():
        assert torch.equal(root[name], tensor), name
        assert torch.equal(parts.unshard(name, root[name]), tensor), name
