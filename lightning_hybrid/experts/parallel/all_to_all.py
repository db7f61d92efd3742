"""All-to-all dispatch of rows to the ranks of their experts, and back: two all-to-alls forward, two backward.

    rows of rank 0, by expert   e0 e0 e1 | e2 e3        experts 0 and 1 are on rank 0, 2 and 3 on rank 1
    rows of rank 1              e1 e1    | e2 e2 e3
    rank 0 computes             e0 e0 e1 e1 e1
    rank 1 computes             e2 e2 e2 e3 e3

The ranks first all-gather their row counts per expert, so that messages have exact sizes. With several chunks of
experts, the rows of the next chunk are sent while this one is computed; the backward overlaps likewise, since autograd
runs in reverse order of the launches.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.collectives.tensors import all_gather_single

# (rows [R, D] sorted by expert, row count of each expert, local index of the first of these experts) -> [R, D'].
Compute = Callable[[Tensor, Sequence[int], int], Tensor]


class ExpertAllToAll:
    """All-to-all over ranks with equal numbers of experts: the first rank has the first experts.

    Attributes:
        num_exchanges: Number of all-to-alls that this rank launched, forward and backward.
    """

    def __init__(self, group: dist.ProcessGroup, *, chunks: int = 1) -> None:
        """Take ``group`` (the ranks), ``chunks`` (of each rank's experts, whose messages overlap with computation)."""
        self._group, self._chunks = group, chunks
        self.num_exchanges = 0

    def run(self, rows: Tensor, counts: Tensor, compute: Compute, *, trains: bool) -> Tensor:
        """Computes each row on the rank that has its expert; collective.

        Rows [P, D] are sorted by expert, of which there are ``counts`` [E]; others after them are ignored. ``compute``
        is also called with no rows, to get the shape of its result. ``trains``, whether a gradient is required, is the
        same on every rank. The results, [sum of counts, D'], are in the order of the rows.
        """
        size, rank = self._group.size(), self._group.rank()
        all_counts = counts.new_empty(size * counts.numel())
        all_gather_single(all_counts, counts.contiguous(), group=self._group)
        num_local = counts.numel() // size
        # [source][owner][expert of the owner]: the one copy to the host of an exchange, forward and backward
        numbers = all_counts.view(size, size, num_local).tolist()
        sent, received = numbers[rank], [of_source[rank] for of_source in numbers]
        rows = rows[: sum(map(sum, sent))]
        bounds = _chunk_bounds(num_local, self._chunks)
        by_owner = [[sum(n[first:end]) for first, end in bounds] for n in sent]  # [owner][chunk]
        by_chunk = list(zip(*by_owner, strict=True))
        chunks = _transpose(rows, by_owner).split(list(map(sum, by_chunk))) if len(bounds) > 1 else [rows]
        dispatches = []
        for chunk, to_send, (first, end) in zip(chunks, by_chunk, bounds, strict=True):
            message = _AsyncAllToAll(self, to_send, [sum(n[first:end]) for n in received])
            dispatches.append((message, message.launch(chunk, trains)))
        returns = []
        for (message, arriving), (first, end) in zip(dispatches, bounds, strict=True):
            arrived = message.wait_for(arriving)
            sizes = [n[first:end] for n in received]
            out = _run_experts(_transpose(arrived, sizes), [sum(n) for n in zip(*sizes, strict=True)], first, compute)
            reverse = message.reversed()
            by_source = _transpose(out, [list(n) for n in zip(*sizes, strict=True)])
            returns.append((reverse, reverse.launch(by_source, trains)))
        outs = [message.wait_for(arriving) for message, arriving in returns]
        return _transpose(torch.cat(outs), by_chunk) if len(outs) > 1 else outs[0]

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> tuple[Tensor, dist.Work | None]:
        """Launches an all-to-all of rows; returns a buffer, of shape [sum of received, D], and the work to await."""
        self.num_exchanges += 1
        arriving = rows.new_empty((sum(received), *rows.shape[1:]))
        work = dist.all_to_all_single(
            arriving, rows.contiguous(), list(received), list(sent), group=self._group, async_op=True
        )
        if torch.is_anomaly_enabled() and work is not None:  # anomaly mode reads gradients before they are waited for
            work.wait()
        return arriving, work


class _AsyncAllToAll:
    """Asynchronous all-to-all of rows in one direction, and of their gradients in the other."""

    def __init__(self, ranks: ExpertAllToAll, sent: Sequence[int], received: Sequence[int]) -> None:
        self.ranks, self.sent, self.received = ranks, sent, received
        self.work: dist.Work | None = None
        self.gradients: Tensor | None = None  # buffer of the gradients of the rows that were sent

    def reversed(self) -> _AsyncAllToAll:
        return _AsyncAllToAll(self.ranks, self.received, self.sent)

    def launch(self, rows: Tensor, trains: bool) -> Tensor:
        """Launches the all-to-all; the result, of shape [sum of received, D], must not be read before ``wait_for``."""
        # A rank whose experts get no rows has a graph of other operations: the all-to-all must be in it nevertheless.
        anchor = torch.zeros((), dtype=rows.dtype, device=rows.device, requires_grad=trains)
        arriving: Tensor = _Launch.apply(rows, anchor, self)
        return arriving

    def wait_for(self, arriving: Tensor) -> Tensor:
        """Returns the rows that have arrived, of the shape of ``arriving``."""
        arrived: Tensor = _Wait.apply(arriving, self)
        return arrived

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
            self.work = None


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, anchor: Tensor, message: _AsyncAllToAll) -> Tensor:
        """Sends rows of shape [sum of sent, D]; the result has [sum of received, D]."""
        ctx.message = message
        arriving, message.work = message.ranks.all_to_all(rows, message.sent, message.received)
        return arriving

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        message: _AsyncAllToAll = ctx.message
        message.wait()
        received, message.gradients = message.gradients, None
        return received, None, None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, arriving: Tensor, message: _AsyncAllToAll) -> Tensor:
        """Waits for rows of shape [sum of received, D], which are returned."""
        ctx.message = message
        message.wait()
        # A recomputed layer stops once all its saved tensors are restored: on no rank before this all-to-all.
        ctx.save_for_backward(arriving.new_empty(()))
        ctx.mark_dirty(arriving)  # the same memory, which is written now
        return arriving

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        _ = ctx.saved_tensors
        message: _AsyncAllToAll = ctx.message
        if torch.is_grad_enabled():  # this gradient will be differentiated too, as by a gradient penalty
            reverse = message.reversed()
            message.gradients = reverse.wait_for(reverse.launch(gradients[0], True))
            return gradients[0].new_zeros(()).expand(gradients[0].shape), None
        message.gradients, message.work = message.ranks.all_to_all(gradients[0], message.received, message.sent)
        # The buffer has another shape than the gradient that autograd expects here, so it is passed by the message.
        return gradients[0].new_zeros(()).expand(gradients[0].shape), None


def _run_experts(rows: Tensor, counts: Sequence[int], first: int, compute: Compute) -> Tensor:
    out = compute(rows, counts, first)
    if not rows.shape[0] and torch.is_grad_enabled() and rows.requires_grad:
        out = out + rows.sum().to(out.dtype)  # no row, but its all-to-all must have a backward
    return out


def _chunk_bounds(num_experts: int, chunks: int) -> list[tuple[int, int]]:
    """Returns start and stop of the experts of each chunk."""
    chunks = max(1, min(chunks, num_experts))
    bounds = [num_experts * number // chunks for number in range(chunks + 1)]
    return list(itertools.pairwise(bounds))


def _transpose(rows: Tensor, sizes: Sequence[Sequence[int]]) -> Tensor:
    """Reorders blocks of rows [R, D] from order (a, b) to order (b, a); block (a, b) has ``sizes[a][b]`` rows."""
    if sum(any(row) for row in sizes) <= 1 or len(sizes[0]) == 1:
        return rows
    pieces = rows.split([size for row in sizes for size in row])
    width = len(sizes[0])
    return torch.cat([pieces[a * width + b] for b in range(width) for a in range(len(sizes)) if sizes[a][b]])
