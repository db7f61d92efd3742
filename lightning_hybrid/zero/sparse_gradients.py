"""Gradients that are sparse in their first dim (``nn.Embedding(sparse=True)``), in the message of a reduction.

They are sent as dense ones, with a flag for each row that a rank has: to an optimizer a missing row is not a zero one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_hybrid.parts.placement import Shard
from lightning_hybrid.zero.shard_layout import ShardRanks


class SparseRows:
    """Flags of the rows for which the parameters of one group have gradients."""

    def __init__(self, shapes: Mapping[str, Tensor], placements: Mapping[str, Shard], ranks: ShardRanks) -> None:
        self._placements = {name: placements.get(name) for name in shapes}
        self._num_rows = {name: parameter.shape[0] for name, parameter in shapes.items()}
        self._size = ranks.shard.size()

    def sizes(self, names: Sequence[str]) -> dict[str, int]:
        """Elements that the flags of these parameters take in a message, by a key for each."""
        found = {}
        for name in names:
            if name in self._placements:
                placement = self._by_rows(name)
                found[_key(name)] = self._num_rows[name] if placement is None else placement.local_length
        return found

    def write_flags(self, name: str, gradient: Tensor, message: Tensor, offsets: Mapping[str, int]) -> Tensor:
        """Write into a message, one row per rank, the flags of a gradient; returns the gradient as a dense one."""
        if name in self._placements:
            has = message.new_ones(gradient.shape[0])
            if gradient.is_sparse:
                has = has.zero_().index_fill_(0, gradient.coalesce().indices()[0], 1.0)
            placement, offset = self._by_rows(name), offsets[_key(name)]
            for rank in range(self._size):
                flags = has
                if placement is not None:
                    ((start, length),) = placement.ranges(rank, self._size)
                    flags = has.narrow(0, start, length)
                message[rank, offset : offset + flags.numel()] = flags
        return gradient.to_dense() if gradient.is_sparse else gradient

    def apply_flags(self, name: str, shard: Tensor, received: Tensor, offsets: Mapping[str, int]) -> Tensor:
        """The local shard of a reduced gradient as a sparse tensor, with the rows that any rank has."""
        if name not in self._placements:
            return shard
        has = received[offsets[_key(name)] :][: shard.shape[0]] > 0
        return torch.sparse_coo_tensor(has.nonzero().T, shard[has], shard.shape, is_coalesced=True)

    def _by_rows(self, name: str) -> Shard | None:
        placement = self._placements[name]
        return placement if placement is not None and placement.dim == 0 else None


def _key(name: str) -> str:
    return f"{name}, rows"
