import itertools

import pytest

from lightning_hybrid.errors import LayoutError
from lightning_hybrid.layout import AXES, Coordinates, ParallelLayout


def test_ranks_are_numbered_with_tensor_innermost_and_pipeline_outermost():
    layout = ParallelLayout(pipeline_parallel_size=2, data_shard_size=2, tensor_parallel_size=2)
    assert layout.sizes == (2, 1, 2, 1, 2)
    assert layout.world_size == 8
    assert layout.coordinates(1) == Coordinates(pp=0, dp_replicate=0, dp_shard=0, cp=0, tp=1)
    assert layout.coordinates(6) == Coordinates(pp=1, dp_replicate=0, dp_shard=1, cp=0, tp=0)
    assert [layout.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]


def test_coordinates_are_those_of_the_rank_and_replicas_cover_the_world():
    layout = ParallelLayout(
        pipeline_parallel_size=2,
        data_replicate_size=3,
        data_shard_size=2,
        context_parallel_size=2,
        tensor_parallel_size=2,
        expert_parallel_size=4,
    )
    assert layout.data_parallel_size == 6
    replicas: dict[int, list[int]] = {}
    ranks = itertools.product(*map(range, layout.sizes))  # the last axis fastest
    for rank, indices in zip(range(layout.world_size), ranks, strict=True):
        assert layout.coordinates(rank) == Coordinates(*indices)
        replicas.setdefault(layout.data_rank(rank), []).append(rank)
    assert sorted(replicas) == list(range(6))
    for replica in replicas.values():
        places = {(place.pp, place.cp, place.tp) for place in map(layout.coordinates, replica)}
        assert len(replica) == len(places) == 8
    assert tuple(Coordinates.__dataclass_fields__) == AXES


def test_resolve_assigns_remaining_ranks_to_data():
    layout = ParallelLayout.resolve(16, pipeline_parallel_size=2, tensor_parallel_size=2)
    assert layout == ParallelLayout(pipeline_parallel_size=2, data_replicate_size=4, tensor_parallel_size=2)
    layout = ParallelLayout.resolve(16, pipeline_parallel_size=2, data_shard_size=4)
    assert layout == ParallelLayout(pipeline_parallel_size=2, data_replicate_size=2, data_shard_size=4)


@pytest.mark.parametrize(
    ("world_size", "sizes", "message"),
    [
        (
            8,
            {"pipeline_parallel_size": 2, "data_parallel_size": 2, "tensor_parallel_size": 4},
            "layout needs pipeline_parallel_size=2 * data_parallel_size=2 * tensor_parallel_size=4 = 16 ranks but the"
            " world has 8; set tensor_parallel_size=2, or devices=16",
        ),
        (
            8,
            {"pipeline_parallel_size": 2, "data_parallel_size": 2},
            "layout needs pipeline_parallel_size=2 * data_parallel_size=2 = 4 ranks but the world has 8; "
            "set data_parallel_size=4, or devices=4",
        ),
        (
            7,
            {"pipeline_parallel_size": 2, "data_parallel_size": 2},
            "layout needs pipeline_parallel_size=2 * data_parallel_size=2 = 4 ranks but the world has 7; set devices=4",
        ),
        (
            8,
            {"pipeline_parallel_size": 3},
            "layout needs a multiple of pipeline_parallel_size=3 ranks but the world has 8; "
            "set pipeline_parallel_size=2 or 4, or devices=6 or 9",
        ),
        (
            8,
            {"pipeline_parallel_size": 4, "tensor_parallel_size": 4},
            "layout needs a multiple of pipeline_parallel_size=4 * tensor_parallel_size=4 = 16 ranks but the world has"
            " 8; set tensor_parallel_size=2, or devices=16",
        ),
        (
            8,
            {"pipeline_parallel_size": 2, "data_shard_size": 8},
            "shard_size=8 does not divide data_parallel_size=4; set shard_size=4",
        ),
    ],
)
def test_misfit_names_both_numbers_and_the_fix(world_size, sizes, message):
    with pytest.raises(LayoutError) as error:
        ParallelLayout.resolve(world_size, **sizes)
    assert str(error.value) == message


@pytest.mark.parametrize("size", [0, -1, True, 2.0, "2", None])
def test_sizes_are_ints_of_at_least_one(size):
    with pytest.raises(LayoutError, match="tensor_parallel_size must be an int >= 1"):
        ParallelLayout(tensor_parallel_size=size)
    with pytest.raises(LayoutError, match="pipeline_parallel_size must be an int >= 1"):
        ParallelLayout.resolve(8, pipeline_parallel_size=size)


def test_experts_must_fit_over_data_and_context():
    assert ParallelLayout(data_shard_size=4, context_parallel_size=2, expert_parallel_size=8).expert_parallel_size == 8
    odd = ParallelLayout(data_shard_size=3, context_parallel_size=4, expert_parallel_size=6)
    assert (odd.expert_replicas, odd.expert_contexts) == (3, 2)
    with pytest.raises(LayoutError, match=r"set expert_parallel_size=4"):
        ParallelLayout(data_shard_size=4, data_replicate_size=3, context_parallel_size=2, expert_parallel_size=12)
    with pytest.raises(LayoutError, match=r"dp\*cp = 6\*1 = 6 ranks.*set expert_parallel_size=2"):
        ParallelLayout(data_shard_size=6, expert_parallel_size=4)


def test_ranks_outside_the_world_are_refused():
    layout = ParallelLayout(data_shard_size=2)
    with pytest.raises(LayoutError, match="rank 2 is not in a world of 2 ranks"):
        layout.coordinates(2)
