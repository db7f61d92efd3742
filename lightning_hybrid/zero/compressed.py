"""Messages of gradients that are reduced in compressed form.

one copy of the model     the reduce-scatter over the ranks of the shard is compressed; each rank keeps the feedback
                          of full gradients, as their shards are on other ranks
several copies            inside a copy gradients are reduced as they are; the all-reduce of a shard over the copies
                          is compressed, with the feedback of the shard alone
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.params.placement import Shard
from lightning_hybrid.slow_links.average import CompressedAverage, PendingSum
from lightning_hybrid.zero.messages import GradientMessages


class _Rows:
    """Rows that hold the shards of one parameter, each padded to the length of the largest."""

    def __init__(self, placement: Shard | None, shape: Sequence[int]) -> None:
        self._placement, self._shape = placement, shape

    def join(self, rows: Tensor) -> Tensor:
        """The gradient, of the full shape, without the padding."""
        gradient = rows.new_empty(self._shape)
        for shard, row in self._pairs(gradient, rows):
            shard.copy_(row)
        return gradient

    def split(self, rows: Tensor, gradient: Tensor) -> None:
        """Write a gradient, of the full shape or flat, into rows of shape (ranks, elements of the largest shard)."""
        for shard, row in self._pairs(gradient.view(self._shape), rows):
            row.copy_(shard)

    def _pairs(self, gradient: Tensor, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        for rank, row in enumerate(rows):
            shard = gradient if self._placement is None else self._placement.view(gradient, rank, len(rows))
            yield shard, row[: shard.numel()].view(shard.shape)


class CompressedGradientMessages(GradientMessages):
    """The messages of one group of parameters, without sparse gradients.

    The columns of the parameters that are compressed come first in a message, then the others and the flags.

    Attributes:
        average: Over the ranks of the shard, or over those that hold copies of it if there are any.
    """

    def __init__(self, *args: Any, average: CompressedAverage) -> None:
        super().__init__(*args)
        self.average = average
        self._over_copies = self._ranks.replicate.size() > 1
        self._compressed: list[str] = []
        self._values: Tensor | None = None  # [ranks, numel of the compressed columns]
        self._sum: PendingSum | None = None

    @classmethod
    def of(cls, messages: GradientMessages, average: CompressedAverage) -> GradientMessages:
        """Make the compressed messages of a group in place of others; sparse gradients are sent as they are."""
        if messages._row_placements:
            return messages
        return cls(messages._shapes, messages._placements, messages._ranks, (), average=average)

    def begin(self, names: Sequence[str], empty: Tensor, num_apart: int = 0) -> None:
        """Begin a message, as `GradientMessages.begin`; ``empty`` has shape (0,)."""
        self._compressed = []
        if not self._over_copies and empty.is_floating_point():
            shapes = {name: self._full_shape(name) for name in names}
            self._compressed = [n for n, shape in shapes.items() if self.average.selects(n, empty.dtype, shape)]
        rest = [name for name in names if name not in self._compressed]
        super().begin([*self._compressed, *rest], empty, len(self._compressed))

    def _full_shape(self, name: str) -> list[int]:
        """The shape of a parameter that the ranks of this group shard."""
        placement = self._placements.get(name)
        return [
            placement.length if placement and dim == placement.dim else n for dim, n in enumerate(self._shapes[name])
        ]

    def launch(self) -> None:
        """Start to send the message; does not wait."""
        message = self._message
        assert message is not None
        self.average.settle()
        traffic, names = self.average.method.traffic, self._compressed
        numel = sum(self._sizes[name] for name in names)
        if not self._over_copies:
            traffic.instead_of(message[:, : len(message[0]) - len(self._names)].nbytes, self._ranks.shard, scatter=True)
            traffic.all_to_all(message[:, numel:], self._ranks.shard)
        for name in self._names[len(names) :] if not self._over_copies else ():
            self.average.add_error(name, message[:, self._rows.offsets[name] :][:, : self._sizes[name]])
        if names:
            self._values = message[:, :numel].contiguous()
            self._message = message[:, numel:].contiguous()
            forms = [_Rows(self._placements.get(name), self._full_shape(name)) for name in names]
            self._sum = self.average.start(names, self._columns_of(names), forms)
        super().launch()

    def _columns_of(self, names: Sequence[str]) -> list[Tensor]:
        """The columns of each compressed parameter, ``[ranks, numel of the largest shard]``."""
        assert self._values is not None
        return list(self._values.split([self._sizes[name] for name in names], 1))

    @property
    def can_finish_early(self) -> bool:
        """Whether ranks may finish messages in different orders: not if they send once more to finish one."""
        return super().can_finish_early and not (self._compressed and self.average.method.needs_matrices)

    def _sum_over_ranks(self, total: Tensor) -> Tensor:
        """Complete the total, ``[numel of a row]``, which lacks the compressed columns."""
        if self._over_copies:
            return self._average_over_copies(total)
        if self._sum is None:
            return super()._sum_over_ranks(total)
        flags = [1.0] * len(self._names) if self._has_all else total[-len(self._names) :].tolist()
        self._sum.finish([flag > 0 for flag in flags[: len(self._compressed)]])
        assert self._values is not None
        total = torch.cat([self._values[self._ranks.shard.rank()], total])
        self._values = self._sum = None
        return total

    def _average_over_copies(self, total: Tensor) -> Tensor:
        own = self._rows.own(total)
        self.average.launch(self._names, [own[name] for name in self._names], total[-len(self._names) :]).wait()
        return total
