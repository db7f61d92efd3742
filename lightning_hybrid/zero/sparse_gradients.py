"""Gradients that are sparse in their first dim (``nn.Embedding(sparse=True)``), in the message of a reduction.

They are sent as dense ones, and beside them which rows each rank has: to an optimizer a missing row is no zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_hybrid.parts.placement import Shard
from lightning_hybrid.zero.shard_layout import ShardRanks


class SparseRows:
    """Which rows of the parameters of one group have gradients."""

    def __init__(self, shapes: Mapping[str, Tensor], cut: Mapping[str, Shard], ranks: ShardRanks) -> None:
        """Args: shapes: parameters with sparse gradients, by FQN. cut: where parts lie. ranks: that hold them."""
        self._cut = {name: cut.get(name) for name in shapes}
        self._num_rows = {name: parameter.shape[0] for name, parameter in shapes.items()}
        self._size = ranks.shard.size()

    def sizes(self, names: Sequence[str]) -> dict[str, int]:
        """What the rows of these take in a message, by a name of their own."""
        found = {}
        for name in names:
            if name in self._cut:
                placement = self._by_rows(name)
                found[_key(name)] = self._num_rows[name] if placement is None else placement.local_length
        return found

    def put(self, name: str, gradient: Tensor, message: Tensor, offsets: Mapping[str, int]) -> Tensor:
        """Note in a message, a row per rank, which rows a gradient has; returns it as a dense one."""
        if name in self._cut:
            has = message.new_ones(gradient.shape[0])
            if gradient.is_sparse:
                has = has.zero_().index_fill_(0, gradient.coalesce().indices()[0], 1.0)
            placement, offset = self._by_rows(name), offsets[_key(name)]
            for rank in range(self._size):
                own = has
                if placement is not None:
                    ((start, length),) = placement.ranges(rank, self._size)
                    own = has.narrow(0, start, length)
                message[rank, offset : offset + own.numel()] = own
        return gradient.to_dense() if gradient.is_sparse else gradient

    def taken(self, name: str, part: Tensor, received: Tensor, offsets: Mapping[str, int]) -> Tensor:
        """What this rank has of a gradient, with the rows that any rank has."""
        if name not in self._cut:
            return part
        has = received[offsets[_key(name)] :][: part.shape[0]] > 0
        return torch.sparse_coo_tensor(has.nonzero().T, part[has], part.shape, is_coalesced=True)

    def _by_rows(self, name: str) -> Shard | None:
        placement = self._cut[name]
        return placement if placement is not None and placement.dim == 0 else None


def _key(name: str) -> str:
    return f"{name}, rows"
