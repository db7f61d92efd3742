"""Ranks of sharded experts in one process: a full module, and a copy with the shards of each rank.

The all-to-all is replaced by calls of the copies. As in a run, the rows of a rank are computed together with rows of
other ranks: a result that depends on these is another one than that of the full module.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.equivalence.deterministic import DeterministicMode
from lightning_hybrid.experts.parallel.adapters import Call, ExpertsAdapter, is_float
from lightning_hybrid.experts.parallel.width import UNSHARDED, WidthSharding
from lightning_hybrid.params.placement import shard_tensor
from lightning_hybrid.step.objects.pytree import flatten, unflatten


class ExpertRanks:
    """A full module, whose parameters may be fake tensors, and modules with the shards of each rank.

    Attributes:
        full: The full module.
        modules: The modules of the ranks: by tensor rank, and by expert-parallel rank.
        placements: Shardings over the expert-parallel ranks, by name of the parameter.
        width: Sharding of each expert over the tensor ranks.
    """

    def __init__(
        self,
        full: nn.Module,
        adapter: ExpertsAdapter,
        size: int,
        width: WidthSharding = UNSHARDED,
        *,
        computes_ends_only: bool = False,
    ) -> None:
        """Makes the shards; with ``computes_ends_only``, results of ranks between the first and the last are empty."""
        self._computes_ends_only = computes_ends_only
        self.full, self._adapter, self.size, self.width = full, adapter, size, width
        self.placements = adapter.placements(full, size) if size > 1 else {}
        self.modules = [
            [self._local_copy(tensor_rank, rank) for rank in range(size)] for tensor_rank in range(width.size)
        ]

    def _local_copy(self, tensor_rank: int, rank: int) -> nn.Module:
        memo: dict[int, Any] = {}
        for name, parameter in self.full.named_parameters():
            shard = self.local_shard(name, parameter.detach(), tensor_rank, rank).clone().contiguous()
            memo[id(parameter)] = nn.Parameter(shard, requires_grad=parameter.requires_grad)
        return copy.deepcopy(self.full, memo)

    def local_shard(self, name: str, tensor: Tensor, tensor_rank: int, rank: int) -> Tensor:
        """Returns a rank's shard of a parameter or its gradient, given with the full shape."""
        if name in self.width.placements:
            tensor = shard_tensor(tensor, self.width.placements[name], tensor_rank, self.width.size)
        return shard_tensor(tensor, self.placements[name], rank, self.size) if name in self.placements else tensor

    def call(self, rank: int, *args: Any, **kwargs: Any) -> Any:
        """Returns the result of a call on one expert-parallel rank: the sum over its tensor ranks."""
        tensor_ranks = [each for each in range(self.width.size) if self._is_computed(each, self.width.size)]
        outs = [self._addend(tensor_rank, rank, args, kwargs) for tensor_rank in tensor_ranks]
        return outs[0] if len(outs) == 1 else torch.stack(outs).sum(0)

    def _addend(self, tensor_rank: int, rank: int, args: Any, kwargs: Any) -> Any:
        module, forward = self.modules[tensor_rank][rank], partial(self._local_forward, tensor_rank, rank)
        if self.size == 1:
            return forward(*args, **kwargs)
        return self._adapter.run(module, forward, args, kwargs, partial(self._exchange, tensor_rank))

    def _local_forward(self, tensor_rank: int, rank: int, *args: Any, **kwargs: Any) -> Any:
        module = self.modules[tensor_rank][rank]
        with self.width.local_features(module, tensor_rank, list):
            return module.forward(*args, **kwargs)

    def _exchange(self, tensor_rank: int, rows: Tensor, counts: Tensor) -> Tensor:
        """Replaces the all-to-all: the module of each rank computes its rows in this process."""
        numbers = counts.view(self.size, -1).tolist()
        blocks = rows[: int(counts.sum())].split([sum(of_rank) for of_rank in numbers])
        outs: list[Tensor] = []
        for rank, (block, of_rank) in enumerate(zip(blocks, numbers, strict=True)):
            if self._is_computed(rank, self.size):
                outs.append(self._compute(tensor_rank, rank, block, of_rank))
            else:
                outs.append(outs[0].new_empty(len(block), *outs[0].shape[1:]))
        return torch.cat(outs)

    def _is_computed(self, rank: int, size: int) -> bool:
        return not self._computes_ends_only or rank in (0, size - 1)

    def _compute(self, tensor_rank: int, rank: int, rows: Tensor, counts: list[int]) -> Tensor:
        """Returns results for rows; rows of one expert may come between two rows of other ranks."""
        module, forward = self.modules[tensor_rank][rank], partial(self._local_forward, tensor_rank, rank)
        with torch._C.DisableTorchFunction():  # no draw of the module's
            drawn = torch.randn(2 * len(counts), *rows.shape[1:], generator=torch.Generator().manual_seed(rank))
            others = drawn.to(rows.dtype).split(1)
        numbers = [count + 2 * bool(count) for count in counts]
        pieces = zip(others[::2], rows.split(counts), others[1::2], strict=True)
        mixed = [part for piece in pieces if len(piece[1]) for part in piece] or [rows]
        out = self._adapter.compute(module, forward, torch.cat(mixed), numbers, 0)
        return torch.cat([part[1:-1] if len(part) else part for part in out.split(numbers)])


@contextlib.contextmanager
def comparable(adapter: ExpertsAdapter, dtype: torch.dtype) -> Iterator[None]:
    """Makes runs inside agree to the last digits: one dtype, no dropout, equal draws where code runs again."""
    exact = DeterministicMode(dtype)
    before = adapter.draw_again_by(exact.redrawn_afterwards())  # which is a decorator too
    try:
        with exact:
            yield
    finally:
        adapter.draw_again_by(before)


def prepared(call: Call, prepare: Callable[[Tensor], Tensor]) -> tuple[list[Any], list[Any], Call]:
    """Prepares floating tensors, of any shapes, of a call; returns its leaves, clones, and the call of these clones."""
    leaves, spec = flatten(call)
    inputs = [prepare(leaf) if is_float(leaf) else leaf for leaf in leaves]
    given = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in inputs]
    cloned: Call = unflatten(given, spec)
    return inputs, given, cloned


def examples(
    adapter: ExpertsAdapter, call: Call, size: int, most: int, generator: torch.Generator
) -> Iterator[tuple[int, Call]]:
    """Yields the first ranks and the last one, of two at least, each with a small call that has tokens of its own."""
    size = max(2, size)
    for rank in (*range(min(size - 1, most)), size - 1):
        yield rank, adapter.example(call, rank, size, generator)
