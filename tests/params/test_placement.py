"""Parameters are sharded and joined as their placement says."""

import pytest
import torch

from lightning_hybrid.params.placement import (
    Piece,
    Replicated,
    Shard,
    embed_in_zeros,
    join,
    padded,
    shard_tensor,
    split_over_two_axes,
)

PLACEMENTS = [
    Replicated(),
    Shard.evenly(0, 12, 4),
    Shard.evenly(1, 8, 4),
    Shard(0, (Piece(8, 4), Piece(4, 4))),
    Shard(0, (Piece(8, 4), Piece(2, 2), Piece(2, 1))),
]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_join_inverts_cut(placement):
    full = torch.arange(96.0).view(12, 8)
    shards = [shard_tensor(full, placement, rank, 4) for rank in range(4)]
    assert torch.equal(join(shards, placement), full)


def test_every_rank_gets_its_shard_of_each_piece():
    placement = Shard(0, (Piece(4, 4), Piece(2, 2)))
    assert [shard_tensor(torch.arange(6), placement, rank, 4).tolist() for rank in range(4)] == [
        [0, 4],
        [1, 4],
        [2, 5],
        [3, 5],
    ]


def test_last_shard_of_an_uneven_piece_is_smaller():
    placement = Shard.unevenly(1, 13, 4)
    full = torch.arange(26.0).view(2, 13)
    shards = [shard_tensor(full, placement, rank, 4) for rank in range(4)]
    assert [shard.shape[1] for shard in shards] == [4, 4, 4, 1]
    assert torch.equal(join(shards, placement), full)
    assert torch.equal(join([padded(shard, placement) for shard in shards], placement), full)
    assert torch.equal(sum(embed_in_zeros(shard, placement, rank, 4) for rank, shard in enumerate(shards)), full)
    with pytest.raises(ValueError, match="length 5 cannot be sharded into 4 shards"):
        Shard.unevenly(0, 5, 4)
    with pytest.raises(ValueError, match="2 pieces along one dim"):
        Shard(0, (Piece(5, 2, uneven=True), Piece(4, 2)))


def test_replicated_shards_sum_to_a_multiple_of_the_full_tensor():
    placement = Shard(0, (Piece(4, 4), Piece(2, 2)))
    full = torch.arange(1.0, 7)
    total = sum(embed_in_zeros(shard_tensor(full, placement, rank, 4), placement, rank, 4) for rank in range(4))
    assert total.tolist() == [1, 2, 3, 4, 10, 12]


def test_offsets_into_the_full_tensor():
    placement = Shard(0, (Piece(8, 4), Piece(4, 2)))
    assert [placement.local_offset(offset) for offset in (0, 4, 5, 8, 10, 12)] == [0, 1, None, 2, 3, 4]


def test_placement_of_another_size_is_refused():
    with pytest.raises(ValueError, match=r"shards a dim of 12, but dim 0 of shape \(8, 8\) has 8"):
        shard_tensor(torch.zeros(8, 8), Shard.evenly(0, 12, 4), 0, 4)
    with pytest.raises(ValueError, match="length 6 cannot be sharded into 4"):
        Piece(6, 4)
    with pytest.raises(ValueError, match="3 shards cannot be split evenly over 4 ranks"):
        shard_tensor(torch.zeros(6), Shard(0, (Piece(6, 3),)), 0, 4)


@pytest.mark.parametrize("placement", PLACEMENTS[1:], ids=str)
def test_two_axes_shard_one_after_the_other(placement):
    full = torch.arange(96.0).view(12, 8)
    first, second = split_over_two_axes(placement, 2, 2)
    shards = [shard_tensor(shard_tensor(full, first, rank // 2, 2), second, rank % 2, 2) for rank in range(4)]
    assert all(torch.equal(shard, shard_tensor(full, placement, rank, 4)) for rank, shard in enumerate(shards))
    assert split_over_two_axes(placement, 1, 4) == (Replicated(), placement)


def test_shards_that_two_axes_cannot_nest():
    assert split_over_two_axes(Shard(0, (Piece(12, 3),)), 2, 3) is None
