"""Rows of a message, one for each rank of a shard: the rank's shards of some tensors, one after the other.

Each shard is padded to the size of the largest. Shards of one size along the first dim, as nearly all are, are rows of
the full tensor, so that neighbours in the message are copied together, whatever the number of tensors and ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from lightning_hybrid.params.placement import Shard
from lightning_hybrid.zero.ranks import numel_of_largest_shard, offsets_of


class ShardRows:
    """The places of shards in rows.

    Attributes:
        sizes: Elements of each tensor in a row, by name, in the order of the row.
        offsets: Where they begin.
        numel: Where the last of them ends.
    """

    def __init__(
        self, shapes: Mapping[str, Sequence[int]], placements: Mapping[str, Shard | None], num_ranks: int
    ) -> None:
        """Find the places of tensors, from the shapes of the shards on this rank; full ones have no placement."""
        self._shapes = {name: torch.Size(shape) for name, shape in shapes.items()}
        self._placements, self._num_ranks = placements, num_ranks
        self.sizes = {name: numel_of_largest_shard(shape, placements.get(name)) for name, shape in shapes.items()}
        self.offsets, self.numel = offsets_of(self.sizes)
        self._runs = [(are_rows, list(names)) for are_rows, names in itertools.groupby(shapes, self._is_row)]

    def _is_row(self, name: str) -> bool:
        """Whether each rank's shard is a row of the full tensor, seen as a matrix."""
        placement = self._placements.get(name)
        return placement is not None and placement.dim == 0 and not placement.is_uneven

    @property
    def are_rows(self) -> bool:
        """Whether all shards are rows of their full tensors."""
        return all(are_rows for are_rows, _ in self._runs)

    def own(self, row: Tensor) -> dict[str, Tensor]:
        """This rank's shards by name, each of its own shape, as views of its row of shape [numel]."""
        pieces = row[: self.numel].split_with_sizes(list(self.sizes.values()))
        whole = zip(self._shapes.items(), pieces, strict=True)
        return {n: (p if p.numel() == shape.numel() else p[: shape.numel()]).view(shape) for (n, shape), p in whole}

    def read(self, rows: Tensor, full: Mapping[str, Tensor]) -> None:
        """Copy rows of shape [ranks, numel] into contiguous full tensors, each of its own shape, by name."""
        for are_rows, names in self._runs:
            if are_rows:
                start, sizes = self.offsets[names[0]], [self.sizes[name] for name in names]
                targets = [full[name].view(self._num_ranks, -1) for name in names]
                columns = rows[:, start : start + sum(sizes)]
                if columns.dtype == targets[0].dtype:
                    torch.split_with_sizes_copy(columns, sizes, 1, out=targets)
                else:  # rounded for the message
                    torch._foreach_copy_(targets, columns.split_with_sizes(sizes, 1))
            else:
                for name in names:
                    for shards, target in self.pairs(name, rows, full[name]):
                        target.copy_(shards)

    def joined(self, full: Mapping[str, Tensor], end: Tensor) -> Tensor:
        """Full tensors, by name, each of its own shape, as a message of shape [ranks, numel]; all `are_rows`.

        The message ends with ``end``, which has a row for each rank too.
        """
        parts = [full[name].reshape(self._num_ranks, -1) for name in self.sizes]
        message = end.new_empty(self._num_ranks, self.numel + end.shape[1])
        return torch.cat([*parts, end], 1, out=message)

    def pairs(self, name: str, rows: Tensor, full: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield views of rows, of shape [ranks, numel], and of a full tensor, for the same shards, both [ranks, ...].

        They are few whatever the number of ranks.
        """
        placement = self._placements.get(name)
        views: Iterable[tuple[slice, Tensor]]
        if placement is None:
            views = [(slice(self._num_ranks), full.expand(self._num_ranks, *full.shape))]
        else:
            views = placement.views(full, self._num_ranks)
        column = rows[:, self.offsets[name] :]
        for ranks, shards in views:
            yield column[ranks, : shards[0].numel()].view(shards.shape), shards
