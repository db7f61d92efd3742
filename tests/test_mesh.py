"""The groups of a mesh contain the ranks of the layout, on real ranks and, at 64, on a fake process group."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_hybrid.errors import LayoutError
from lightning_hybrid.layout import AXES, ParallelLayout
from lightning_hybrid.mesh import FLATTENED, Mesh

LAYOUTS = [
    ParallelLayout(),
    ParallelLayout(pipeline_parallel_size=2),
    ParallelLayout(tensor_parallel_size=2),
    ParallelLayout(data_shard_size=2, context_parallel_size=2),
    ParallelLayout(data_replicate_size=2, data_shard_size=2),
    ParallelLayout(pipeline_parallel_size=2, data_shard_size=2, tensor_parallel_size=2),
    ParallelLayout(pipeline_parallel_size=2, data_replicate_size=2, context_parallel_size=2),
    ParallelLayout(data_replicate_size=2, data_shard_size=2, tensor_parallel_size=2),
]


def ranks_along(layout, rank, axes):
    """All ranks whose place differs from that of `rank` on `axes` only."""
    here = layout.coordinates(rank)
    others = [axis for axis in AXES if axis not in axes]
    return [
        other
        for other in range(layout.world_size)
        if all(getattr(layout.coordinates(other), axis) == getattr(here, axis) for axis in others)
    ]


def check_groups(mesh):
    for axis, axes in {**{axis: (axis,) for axis in AXES}, **FLATTENED}.items():
        expected = ranks_along(mesh.layout, mesh.rank, axes)
        assert dist.get_process_group_ranks(mesh.group(axis)) == expected, axis
        assert mesh.size(axis) == len(expected), axis
        assert mesh.rank_in(axis) == expected.index(mesh.rank), axis
    for axis in AXES:
        assert mesh.rank_in(axis) == getattr(mesh.coordinates, axis)
    assert mesh.rank_in("data") == mesh.layout.data_rank(mesh.rank)


@pytest.mark.parametrize(
    "layout", [pytest.param(layout, marks=pytest.mark.world(layout.world_size)) for layout in LAYOUTS]
)
def test_mesh_matches_the_layout(layout):
    mesh = Mesh.build(layout, "cpu")
    assert mesh.rank == dist.get_rank()
    check_groups(mesh)
    check_that_all_reduce_combines_the_ranks_of_its_axis(mesh)
    check_that_the_published_mesh_has_lightnings_names_and_our_groups(mesh)


def check_that_all_reduce_combines_the_ranks_of_its_axis(mesh):
    for axis, axes in {**{axis: (axis,) for axis in AXES}, **FLATTENED}.items():
        ranks = torch.tensor(ranks_along(mesh.layout, mesh.rank, axes), dtype=torch.float64)
        for op, expected in {"sum": ranks.sum(), "mean": ranks.mean(), "max": ranks.max(), "min": ranks.min()}.items():
            tensor = torch.tensor(mesh.rank, dtype=torch.float64)
            assert mesh.all_reduce(tensor, axis, op) is tensor
            assert tensor == expected, (axis, op)


def check_that_the_published_mesh_has_lightnings_names_and_our_groups(mesh):
    published = mesh.published()
    assert published.mesh_dim_names == ("data_parallel", "tensor_parallel")
    for name, axis in {"data_parallel": "data", "tensor_parallel": "tp"}.items():
        assert published[name].get_group() is mesh.group(axis)
        assert published[name].size() == mesh.size(axis)
        assert published[name].get_local_rank() == mesh.rank_in(axis)
        assert published[name].mesh.tolist() == dist.get_process_group_ranks(mesh.group(axis))


# Replicas, shards, experts, context ranks, tensor ranks: groups of rank 1 along the axes of experts, and its places.
EXPERTS = {
    (4, 1, 2, 1, 1): (
        {"ep": [0, 1], "ep_replicate": [1, 3], "ep_shard": [1], "parts": [0, 1]},
        {"inner": 0, "outer": 1},
    ),
    (2, 2, 2, 1, 1): (
        {"ep": [0, 1], "ep_replicate": [1, 3], "ep_shard": [1], "parts": [0, 1]},
        {"inner": 1, "outer": 0},
    ),
    (1, 4, 2, 1, 1): ({"ep": [0, 1], "ep_replicate": [1, 3], "ep_shard": [1, 3], "parts": [0, 1, 2, 3]}, {"inner": 1}),
    (2, 2, 4, 1, 1): ({"ep": [0, 1, 2, 3], "ep_replicate": [1], "parts": [0, 1, 2, 3]}, {"inner": 1, "outer": 0}),
    (2, 1, 2, 1, 2): ({"ep": [1, 3], "ep_replicate": [1], "parts": [0, 1, 2, 3]}, {"inner": 0, "outer": 0}),
    (2, 1, 2, 2, 1): ({"ep": [0, 1], "ep_replicate": [1, 3], "parts": [1], "holders": [0, 1]}, {"cp_inner": 1}),
    (1, 2, 2, 2, 1): ({"ep": [0, 1], "ep_shard": [1, 3], "ep_outer": [1], "parts": [1, 3]}, {"cp_inner": 1}),
    (1, 2, 4, 2, 1): ({"ep": [0, 1, 2, 3], "ep_shard": [1], "holders": [0, 1, 2, 3]}, {"inner": 0, "cp_inner": 1}),
    (1, 1, 2, 4, 1): ({"ep": [0, 1], "ep_outer": [1, 3], "holders": [0, 1]}, {"cp_inner": 1}),
}


@pytest.mark.world(4)
@pytest.mark.parametrize("sizes", list(EXPERTS), ids=str)
def test_expert_groups_span_context_and_data(sizes):
    replicate, shard, experts, context, tensor = sizes
    layout = ParallelLayout(
        data_replicate_size=replicate,
        data_shard_size=shard,
        expert_parallel_size=experts,
        context_parallel_size=context,
        tensor_parallel_size=tensor,
    )
    mesh = Mesh.build(layout, "cpu")
    groups, places = EXPERTS[sizes]
    if mesh.rank == 1:
        for axis, expected in groups.items():
            assert dist.get_process_group_ranks(mesh.group(axis)) == expected, axis
        assert {axis: place for axis, place in mesh.places("ep").items() if axis in places} == places


@pytest.mark.world(4)
def test_axis_equal_to_a_flattened_one_shares_its_group():
    mesh = Mesh.build(ParallelLayout(data_shard_size=2, tensor_parallel_size=2), "cpu")
    assert mesh.group("data") is mesh.group("dp_shard")
    assert mesh.group("replica") is mesh.group("tp")
    assert mesh.group("world") is dist.group.WORLD


@pytest.mark.world(4)
def test_each_group_has_the_time_limit_of_the_run():
    limit = timedelta(seconds=77)
    dist.distributed_c10d._set_pg_timeout(limit, dist.group.WORLD)  # as `init_process_group` does
    mesh = Mesh.build(ParallelLayout(pipeline_parallel_size=2, tensor_parallel_size=2), "cpu", limit)
    wider = mesh.with_shards_over(["pp"])
    groups = [*wider.groups, mesh.dedicated_group("data", "tests"), mesh.dedicated_world()]
    assert len(groups) > 6
    assert {group._get_backend(torch.device("cpu")).options._timeout for group in groups} == {limit}


@pytest.mark.world(2)
def test_axis_of_size_1_does_not_communicate():
    mesh = Mesh.build(ParallelLayout(pipeline_parallel_size=2), "cpu")
    if mesh.rank == 0:  # on one rank; a collective over both would hang
        mesh.all_reduce(torch.ones(1), "data")


@pytest.mark.world(2)
def test_layout_that_does_not_fill_the_world_is_refused():
    layout = ParallelLayout(pipeline_parallel_size=2, tensor_parallel_size=2)
    with pytest.raises(LayoutError, match=r"= 2\*1\*1\*1\*2 = 4 ranks but the world has 2; set devices=4"):
        Mesh.build(layout, "cpu")


@pytest.mark.world(1)
def test_unknown_axes_are_refused_with_the_known_ones():
    mesh = Mesh.build(ParallelLayout(), "cpu")
    with pytest.raises(ValueError, match="no axis 'dp'; use one of pp, dp_replicate, dp_shard, cp, tp, data, replica"):
        mesh.group("dp")
    with pytest.raises(ValueError, match="op='product'; use one of sum, mean, max, min"):
        mesh.all_reduce(torch.ones(1), "tp", "product")


def test_mesh_needs_a_process_group():
    with pytest.raises(RuntimeError, match="needs the world's process group"):
        Mesh.build(ParallelLayout(), "cpu")


@pytest.mark.parametrize("rank", [0, 13, 42, 63])
def test_groups_at_64_ranks(rank):
    layout = ParallelLayout(
        pipeline_parallel_size=4,
        data_replicate_size=2,
        data_shard_size=2,
        context_parallel_size=2,
        tensor_parallel_size=2,
    )
    dist.init_process_group("fake", rank=rank, world_size=64, store=FakeStore())
    try:
        check_groups(Mesh.build(layout, "cpu"))
    finally:
        dist.destroy_process_group()


@pytest.mark.world(4)
@pytest.mark.parametrize(
    ("layout", "shared"),
    [
        (ParallelLayout(pipeline_parallel_size=2, data_shard_size=2), ["pp"]),
        (ParallelLayout(pipeline_parallel_size=2, data_replicate_size=2), ["pp"]),
        (ParallelLayout(pipeline_parallel_size=2, tensor_parallel_size=2), ["pp"]),
        (ParallelLayout(pipeline_parallel_size=2, tensor_parallel_size=2), ["pp", "tp"]),
        (ParallelLayout(data_shard_size=2, tensor_parallel_size=2), ["tp"]),
        (ParallelLayout(data_replicate_size=2, context_parallel_size=2), ["cp"]),
        (ParallelLayout(pipeline_parallel_size=4), ["pp"]),
    ],
    ids=str,
)
def test_axis_ranks_to_shard_ranks(layout, shared):
    plain = Mesh.build(layout, "cpu")
    mesh = plain.with_shards_over(shared)
    wider = {
        "shares": shared,
        "dp_shard": [*shared, "dp_shard"],
        "data": [*shared, "dp_replicate", "dp_shard"],
        "parts": [*shared, "dp_shard", "tp"],
        "holders": [*shared, "dp_shard", "tp"],
        **{axis: [] for axis in shared},
    }
    for axis, axes in wider.items():
        assert dist.get_process_group_ranks(mesh.group(axis)) == ranks_along(layout, mesh.rank, axes), axis
    assert mesh.places("dp_shard") == {"dp_shard": mesh.rank_in("dp_shard")}
    for axis in ("dp_replicate", "replica", "world"):
        assert mesh.group(axis) is plain.group(axis)
    total = mesh.all_reduce(torch.ones(()), "data")
    assert float(total) == layout.data_parallel_size * mesh.size("shares")
