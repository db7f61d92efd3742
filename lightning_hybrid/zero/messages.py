"""Messages in which the gradients of one group of parameters are reduced: a reduce-scatter of one row for each rank.

    row of a rank   its shard of each gradient | flags of rows of sparse gradients | padding | a flag for each gradient

Gradients that are sparse in their first dim (``nn.Embedding(sparse=True)``) are sent as dense ones, with a flag for
each row that a rank has: to an optimizer a missing row is not a zero one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.collectives.tensors import aligned_numel
from lightning_hybrid.host_copies import HostReads
from lightning_hybrid.params.placement import Shard
from lightning_hybrid.zero.ranks import ShardRanks, numel_of_largest_shard
from lightning_hybrid.zero.rows import ShardRows

# torch 2.13 gave the collectives on single tensors new names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class GradientMessages:
    """The messages of one group of parameters, one after the other.

    Attributes:
        is_launched: Whether a message has been sent, and `finish` has not read the result.
        average: Averages in compressed form, if gradients are compressed.
        is_local: Whether gradients are averaged inside one copy of the model only, and not over copies.
    """

    def __init__(
        self,
        shapes: Mapping[str, torch.Size],
        placements: Mapping[str, Shard],
        ranks: ShardRanks,
        sparse: Collection[str],
    ) -> None:
        self._shapes, self._placements, self._ranks = shapes, placements, ranks
        self._size = ranks.shard.size()
        self._sizes = {name: numel_of_largest_shard(shape, placements.get(name)) for name, shape in shapes.items()}
        by_rows = {name: placements[name] for name in sparse if name in placements and placements[name].dim == 0}
        self._row_placements: dict[str, Shard | None] = {name: by_rows.get(name) for name in sparse if name in shapes}
        self._names: list[str] = []
        self._written: set[str] = set()
        self._num_apart = 0
        self._rows = ShardRows({}, {}, self._size)
        self._end = torch.empty(0)  # of each row: padding and flags
        self._message: Tensor | None = None
        self._work: dist.Work | None = None
        self._total: Tensor | None = None  # this rank's row, summed over the shard's ranks
        self._device_type, self._dtype = "", torch.float32
        self.is_launched = self.is_local = self._is_complete = False
        self._reads, self._flags = HostReads(), 0  # what reads the flags of a complete message, and their number there
        self.average: Any = None

    @property
    def row_sizes(self) -> Mapping[str, int]:
        """Numbers of elements of each parameter in a row, as in the largest shard, by FQN."""
        return self._sizes

    def stay_local(self, is_local: bool) -> None:
        """Average inside one copy of the model only, from the next step on, or over copies again."""
        self.is_local = is_local

    def begin(self, names: Sequence[str], empty: Tensor, num_apart: int = 0) -> None:
        """Begin a message of the gradients of these parameters, of the dtype and device of a tensor of shape (0,).

        The columns of the first ``num_apart`` ones are not sent with the others.
        """
        self._written, self._device_type = set(), empty.device.type
        before = self._names, self._num_apart, self._dtype, self._end.device
        if before == ([*names], num_apart, empty.dtype, empty.device):
            return
        self._names, self._num_apart, self._dtype = list(names), num_apart, empty.dtype
        shapes: dict[str, torch.Size] = {name: self._shapes[name] for name in names}
        placements: dict[str, Shard | None] = {**self._placements}
        for name in names:  # all ranks have their order
            if name in self._row_placements:
                placement = placements[_rows(name)] = self._row_placements[name]
                num_rows = shapes[name][0] if placement is None else placement.local_length
                shapes[_rows(name)] = torch.Size([num_rows])
        self._rows = rows = ShardRows(shapes, placements, self._size)
        dtype, count = self._ranks.reduce_dtype or empty.dtype, len(names)
        num_sent = rows.numel - sum(self._sizes[name] for name in names[:num_apart])
        width = aligned_numel(num_sent + count, dtype) - num_sent
        self._end = empty.new_zeros(self._size, width, dtype=dtype)
        self._end[:, width - count :] = 1.0

    def write(self, gradients: Mapping[str, Tensor]) -> None:
        """Write gradients of the full shape, dense or sparse, into the message; some parameters may have none."""
        rows, end = self._rows, self._end
        self._written = set(gradients)
        divisor = self._size * (1 if self.is_local else self._ranks.replicate.size())
        dtypes = {gradient.dtype for gradient in gradients.values()}
        is_exact = all(torch.promote_types(dtype, end.dtype) == end.dtype for dtype in dtypes)
        if is_exact and self._has_all and rows.are_rows and not self._row_placements:
            self._message = rows.joined(gradients, end)
            self._message[:, : rows.numel].mul_(1.0 / divisor)
            return
        self._message = message = end.new_zeros(self._size, rows.numel + end.shape[1])
        for name, gradient in gradients.items():
            message[:, self._names.index(name) - len(self._names)] = 1.0
            if name in self._row_placements:
                has_row = message.new_ones(gradient.shape[0])
                if gradient.is_sparse:
                    has_row = has_row.zero_().index_fill_(0, gradient.coalesce().indices()[0], 1.0)
                for target, flags in rows.pairs(_rows(name), message, has_row):
                    target.copy_(flags)
            dense = gradient.to_dense() if gradient.is_sparse else gradient
            for target, shards in rows.pairs(name, message, dense):
                # Scaled in the wider of both dtypes, and rounded once.
                wide = torch.promote_types(shards.dtype, target.dtype)
                if shards.dtype != wide == target.dtype:  # without a wide copy of the gradient
                    target.copy_(shards).mul_(1.0 / divisor)
                else:
                    torch.mul(shards.to(wide), 1.0 / divisor, out=target)

    def launch(self) -> None:
        """Start to send the message; does not wait."""
        message, group = self._message, self._ranks.shard
        assert message is not None
        if group.size() == 1:
            self._work = None
        elif dist.get_backend(group) == "gloo":  # whose reduce-scatter is an all-reduce of everything
            self._message = torch.empty_like(message)
            self._work = dist.all_to_all_single(self._message, message, group=group, async_op=True)
        else:
            self._message = message.new_empty(1, message.shape[1])
            self._work = _reduce_scatter(self._message, message, group=group, async_op=True)
        self.is_launched = True

    @property
    def has_arrived(self) -> bool:
        """Whether `receive` need not wait."""
        return self._work is None or self._work.is_completed()

    def receive(self) -> None:
        """Wait for the message, if one was sent; from now on only this rank's row takes memory."""
        received, self._message = self._message, None
        if received is None:
            return
        work, self._work = self._work, None  # a work keeps what it sent and received
        if work is not None:
            work.wait()
        del work
        self._total = received.sum(0) if received.shape[0] > 1 else received[0]

    def abandon(self) -> None:
        """Drop a message of a step that has failed on some rank; all ranks have sent it, or none."""
        if self._work is not None:
            self._work.wait()
        self._message = self._work = self._total = None
        self.is_launched = self._is_complete = False

    def finish(self) -> Iterator[tuple[str, Tensor | None]]:
        """Wait for the message, if one was sent, and for the ranks that hold copies of the shard.

        Yields:
            Each parameter's FQN and the average, of the local shard's shape; None if no rank has a gradient.
        """
        if not self.is_launched:
            return
        if not self._is_complete:
            self.complete(HostReads())
        total, self._total, self.is_launched, self._is_complete = self._total, None, False, False
        assert total is not None
        flags = [1.0] * len(self._names) if self._has_all else self._reads.take(self._flags).tolist()
        own = self._rows.own(total.to(self._dtype))
        for name, has_gradient in zip(self._names, flags, strict=True):
            yield name, self._read(name, own) if has_gradient else None

    def complete(self, reads: HostReads) -> None:
        """Wait for the message, and for the ranks that hold copies of the shard; `finish` reads flags by ``reads``."""
        self.receive()
        assert self._total is not None
        self._total = self._sum_over_ranks(self._total)
        self._is_complete, self._reads = True, reads
        if not self._has_all:
            self._flags = reads.add(self._total[-len(self._names) :])

    @property
    def _has_all(self) -> bool:
        """Whether this rank has all gradients, so that the host need not read whether some rank has them."""
        return self._written == set(self._names)

    def _sum_over_ranks(self, total: Tensor) -> Tensor:
        """Sum this rank's row of the message over the ranks that hold copies of the shard."""
        if self._ranks.replicate.size() > 1 and not self.is_local:
            dist.all_reduce(total, group=self._ranks.replicate)
        return total

    @property
    def can_finish_early(self) -> bool:
        """Whether a rank may finish a message as soon as it has arrived, whatever others do.

        Ranks with copies of the shard are at other points of their backwards, and on a GPU the flags are not known.
        """
        return self._ranks.replicate.size() == 1 and self._device_type == "cpu"

    def _read(self, name: str, own: Mapping[str, Tensor]) -> Tensor:
        shard = own[name]
        if name not in self._row_placements:
            return shard
        has_row = own[_rows(name)][: shard.shape[0]] > 0
        return torch.sparse_coo_tensor(has_row.nonzero().T, shard[has_row], shard.shape, is_coalesced=True)


def _rows(name: str) -> str:
    return f"{name}, rows"
