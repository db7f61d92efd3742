"""Tensor and context ranks as threads of one process.

Collectives synchronize the threads at a barrier: one for the tensor ranks of each context rank, one for the context
ranks of each tensor rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

_T = TypeVar("_T")
_TIMEOUT = 60.0


class TrialFailed(Exception):
    """A rank of a trial raised; has the message of its exception."""


class _ThreadGroup:
    """The barrier and slots over which threads exchange tensors."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=_TIMEOUT)
        self.slots: list[Any] = [None] * size


class ThreadRanks:
    """One rank of a trial, with the collectives of the protocol `Ranks` between threads."""

    def __init__(self, rank: int, group: _ThreadGroup) -> None:
        self.rank, self.size, self._group = rank, group.size, group

    def all_reduce(self, tensor: Tensor) -> None:
        """Sums a contiguous tensor of any shape over the ranks, in place."""
        # Each rank sums its share of all addends in place: they may be gradients of full layers.
        addends = [addend.view(-1) for addend in self.all_gather(tensor)]
        shares = [addend.tensor_split(self.size)[self.rank] for addend in addends]
        for addend in shares[1:]:
            shares[0].add_(addend)
        for addend in shares[1:]:
            addend.copy_(shares[0])
        self._group.barrier.wait()

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, in their order; all have one shape."""
        group = self._group
        group.slots[self.rank] = tensor.detach()
        group.barrier.wait()
        gathered = list(group.slots)
        group.barrier.wait()
        if len({other.shape for other in gathered}) > 1:
            raise TrialFailed(f"ranks exchange tensors of shapes {[tuple(other.shape) for other in gathered]}")
        return gathered

    def exchange(self, parts: list[Tensor], shapes: list[torch.Size]) -> list[Tensor]:
        """All-to-all: sends one tensor to each rank; returns the tensor from each rank, in these shapes."""
        group = self._group
        group.slots[self.rank] = [tensor.detach() for tensor in parts]
        group.barrier.wait()
        received = [sent[self.rank] for sent in group.slots]
        group.barrier.wait()
        if [tensor.shape for tensor in received] != list(shapes):
            raise TrialFailed(f"a rank expects shapes {shapes} and receives {[tensor.shape for tensor in received]}")
        return received


def on_ranks(size: int, run: Callable[[ThreadRanks], _T]) -> list[_T]:
    """Runs a function on `size` ranks at once, in threads; returns the results in the order of ranks.

    Raises:
        TrialFailed: A rank raised, or the ranks did not exchange the same things.
    """
    return ThreadGroups(size, 1).run_on_each(lambda ranks, _: run(ranks))


class ThreadGroups:
    """The thread groups of tensor ranks times context ranks, in the order of `PairedRanks`."""

    def __init__(self, size: int, context: int) -> None:
        self._tensor = [_ThreadGroup(size) for _ in range(context)]
        self._context = [_ThreadGroup(context) for _ in range(size)]

    def run_on_each(self, run: Callable[[ThreadRanks, ThreadRanks], _T]) -> list[_T]:
        """Runs a function on all ranks at once, in threads; returns the results in the order of ranks.

        Args:
            run: Called with the rank among the tensor ranks, and the rank among the context ranks.

        Raises:
            TrialFailed: A rank raised, or the ranks did not exchange the same things.
        """
        found: dict[int, _T] = {}
        errors: list[BaseException] = []

        def one(rank: int) -> None:
            outer, inner = divmod(rank, len(self._tensor))
            try:
                found[rank] = run(ThreadRanks(outer, self._tensor[inner]), ThreadRanks(inner, self._context[outer]))
            except BaseException as error:
                errors.append(error)
                for group in (*self._tensor, *self._context):
                    group.barrier.abort()

        ranks = range(len(self._tensor) * len(self._context))
        threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            first = next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), None)
            if first is None:
                raise TrialFailed("the ranks did not exchange the same things")
            raise TrialFailed(f"{type(first).__name__}: {first}") from first
        return [found[rank] for rank in ranks]
