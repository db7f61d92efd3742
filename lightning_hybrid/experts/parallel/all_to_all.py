"""Rows go to the ranks that hold their experts, and come back: two all-to-alls forward, two backward.

    rows of rank 0, by expert   e0 e0 e1 | e2 e3        experts 0 and 1 are on rank 0, 2 and 3 on rank 1
    rows of rank 1              e1 e1    | e2 e2 e3
    rank 0 computes             e0 e0 e1 e1 e1
    rank 1 computes             e2 e2 e2 e3 e3

Each rank first says how many rows of each expert it has, so that messages have exact sizes. In several chunks of
experts, the rows of the next chunk travel while this one is computed; the backward overlaps likewise, since autograd
runs what was launched last first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Of rows [R, D], sorted by expert, how many of each expert, and the first of these experts on this rank: [R, D'].
Compute = Callable[[Tensor, Sequence[int], int], Tensor]


class RanksOfExperts:
    """Ranks that share experts evenly: the first rank has the first experts.

    Attributes:
        num_exchanges: All-to-alls that this rank launched, forward and backward.
    """

    def __init__(self, group: dist.ProcessGroup, *, chunks: int = 1) -> None:
        """Args: group: the ranks. chunks: of the experts of each rank; their messages overlap with computation."""
        self._group, self._chunks = group, chunks
        self.num_exchanges = 0

    def run(self, rows: Tensor, counts: Tensor, compute: Compute, *, trains: bool) -> Tensor:
        """Let each row be computed by the rank that holds its expert; collective.

        Args:
            rows: [P, D], sorted by expert; what lies behind those that are counted is nobody's.
            counts: [E], how many rows each expert gets.
            compute: What the experts of this rank do; also called for no rows, to learn the form of the result.
            trains: Whether something in it takes gradients; the same on every rank.

        Returns:
            [sum of counts, D'], in the order of ``rows``.
        """
        size, rank = self._group.size(), self._group.rank()
        all_counts = [torch.empty_like(counts) for _ in range(size)]
        dist.all_gather(all_counts, counts.contiguous(), group=self._group)
        each = counts.numel() // size
        numbers = torch.stack(all_counts).view(size, size, each).tolist()  # [source][holder][expert of the holder]
        sent, received = numbers[rank], [of[rank] for of in numbers]
        rows = rows[: sum(map(sum, sent))]
        bounds = _chunks_of(each, self._chunks)
        flights = []
        for part, (first, end) in zip(_by_chunk(rows, sent, bounds), bounds, strict=True):
            flight = _Flight(self, [sum(n[first:end]) for n in sent], [sum(n[first:end]) for n in received])
            flights.append((flight, flight.launch(part, trains)))
        back = []
        for (flight, arriving), (first, end) in zip(flights, bounds, strict=True):
            arrived = flight.land(arriving)
            sizes = [n[first:end] for n in received]
            out = _computed(_swapped(arrived, sizes), [sum(n) for n in zip(*sizes, strict=True)], first, compute)
            returning = flight.reversed()
            by_source = _swapped(out, [list(n) for n in zip(*sizes, strict=True)])
            back.append((returning, returning.launch(by_source, trains)))
        outs = [flight.land(arriving) for flight, arriving in back]
        return _joined(outs, sent, bounds)

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> tuple[Tensor, dist.Work | None]:
        """Begin one exchange: what will hold the rows that arrive, and the work to wait for."""
        self.num_exchanges += 1
        arriving = rows.new_empty((sum(received), *rows.shape[1:]))
        work = dist.all_to_all_single(
            arriving, rows.contiguous(), list(received), list(sent), group=self._group, async_op=True
        )
        if torch.is_anomaly_enabled() and work is not None:  # which looks at gradients as they are handed on
            work.wait()
        return arriving, work


class _Flight:
    """Rows on their way in one direction, and their gradients in the other."""

    def __init__(self, ranks: RanksOfExperts, sent: Sequence[int], received: Sequence[int]) -> None:
        self.ranks, self.sent, self.received = ranks, sent, received
        self.work: dist.Work | None = None
        self.leaving: Tensor | None = None  # gradients of the rows that were sent, on their way back

    def reversed(self) -> _Flight:
        return _Flight(self.ranks, self.received, self.sent)

    def launch(self, rows: Tensor, trains: bool) -> Tensor:
        """The rows that arrive, before they have: nobody may read them until they land."""
        # A rank whose experts get no rows has a graph of other operations: the exchange must be in it all the same.
        anchor = torch.zeros((), dtype=rows.dtype, device=rows.device, requires_grad=trains)
        arriving: Tensor = _Launch.apply(rows, anchor, self)
        return arriving

    def land(self, arriving: Tensor) -> Tensor:
        landed: Tensor = _Land.apply(arriving, self)
        return landed

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
            self.work = None


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, anchor: Tensor, flight: _Flight) -> Tensor:
        ctx.flight = flight
        arriving, flight.work = flight.ranks.all_to_all(rows, flight.sent, flight.received)
        return arriving

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        flight: _Flight = ctx.flight
        flight.wait()
        leaving, flight.leaving = flight.leaving, None
        return leaving, None, None


class _Land(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, arriving: Tensor, flight: _Flight) -> Tensor:
        ctx.flight = flight
        flight.wait()
        # A layer that is computed again stops once it has all that it saved: on every rank not before this exchange.
        ctx.save_for_backward(arriving.new_empty(()))
        ctx.mark_dirty(arriving)  # the same memory, which is written now
        return arriving

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        _ = ctx.saved_tensors
        flight: _Flight = ctx.flight
        flight.leaving, flight.work = flight.ranks.all_to_all(gradients[0], flight.received, flight.sent)
        # What is on its way has another shape than what autograd hands on here, so it goes by the flight.
        return gradients[0].new_zeros(()).expand(gradients[0].shape), None


def _computed(rows: Tensor, counts: Sequence[int], first: int, compute: Compute) -> Tensor:
    out = compute(rows, counts, first)
    if not rows.shape[0] and torch.is_grad_enabled() and rows.requires_grad:
        out = out + rows.sum().to(out.dtype)  # no row, yet its exchange must have a backward
    return out


def _chunks_of(each: int, chunks: int) -> list[tuple[int, int]]:
    """First and end of the experts of each chunk."""
    chunks = max(1, min(chunks, each))
    bounds = [each * number // chunks for number in range(chunks + 1)]
    return list(itertools.pairwise(bounds))


def _by_chunk(rows: Tensor, sent: Sequence[Sequence[int]], bounds: Sequence[tuple[int, int]]) -> list[Tensor]:
    """The rows of each chunk, by holder and expert."""
    if len(bounds) == 1:
        return [rows]
    pieces = rows.split([sum(n[first:end]) for n in sent for first, end in bounds])
    return [torch.cat(pieces[number :: len(bounds)]) for number in range(len(bounds))]


def _joined(outs: Sequence[Tensor], sent: Sequence[Sequence[int]], bounds: Sequence[tuple[int, int]]) -> Tensor:
    """The inverse of ``_by_chunk``."""
    if len(outs) == 1:
        return outs[0]
    by_chunk = [out.split([sum(n[first:end]) for n in sent]) for out, (first, end) in zip(outs, bounds, strict=True)]
    return torch.cat([pieces[holder] for holder in range(len(sent)) for pieces in by_chunk])


def _swapped(rows: Tensor, sizes: Sequence[Sequence[int]]) -> Tensor:
    """Rows by (a, b) in the order of (b, a).

    Args:
        rows: As they lie.
        sizes: How many of them are of a and b, by a and b.
    """
    if sum(any(of) for of in sizes) <= 1 or len(sizes[0]) == 1:
        return rows
    pieces = rows.split([size for of in sizes for size in of])
    each = len(sizes[0])
    return torch.cat([pieces[a * each + b] for b in range(each) for a in range(len(sizes)) if sizes[a][b]])
