"""Layout of sharded parameters: which shard a rank has, and the offsets of shards in one message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import nn

from lightning_hybrid.optimizers.state_file import aligned
from lightning_hybrid.params.placement import Shard


@dataclass(frozen=True)
class ShardRanks:
    """The ranks over which parameters are sharded, and the dtypes of their messages."""

    shard: dist.ProcessGroup  # the ranks that together hold one copy
    replicate: dist.ProcessGroup  # the ranks that hold the same shard of other copies
    reduce_dtype: torch.dtype | None = None  # of messages of gradients; that of the parameters if None
    gather_dtype: torch.dtype | None = None  # of messages of parameters; their own if None


def bytes_of_shards(parameters: Mapping[str, nn.Parameter], placements: Mapping[str, Shard]) -> int:
    """Bytes that the shards of a group take in a file; the parameters hold shards."""
    return sum(aligned(p.nbytes) for name, p in parameters.items() if name in placements)


def offsets_of(sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Offset of each tensor in a message, by name, and the end of the last one; sizes in elements."""
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name] = end
        end += size
    return offsets, end


def numel_of_largest_shard(local_shape: Sequence[int], placement: Shard | None) -> int:
    """Number of elements of the largest of all ranks' shards of a parameter, from the shape of this rank's shard."""
    if placement is None:
        return prod(local_shape)
    return prod(placement.local_length if dim == placement.dim else n for dim, n in enumerate(local_shape))


def shard_placement(shape: torch.Size, size: int) -> Shard | None:
    """Placement of a parameter's shards: along the first dim, or the longest if that is too short for all ranks.

    Returns:
        None for a single number, which every rank holds.
    """
    if shape.numel() <= 1:
        return None
    dim = 0 if shape[0] >= size else max(range(len(shape)), key=lambda d: shape[d])
    return Shard.allowing_empty(dim, shape[dim], size)
