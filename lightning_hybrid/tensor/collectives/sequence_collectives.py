"""Collectives over shards of a sequence (sequence and context parallelism), with their gradients.

    shard           forward: this rank's positions    backward: all-gather
    gather          forward: all-gather               backward: this rank's positions (gradients are equal on all ranks)
    enter           forward: all-gather               backward: reduce-scatter
    leave           forward: reduce-scatter           backward: all-gather
    to heads        forward: all-to-all, from all features of the local positions to all positions of the local features
    to positions    forward: all-to-all, the other way round

`shard` and `gather` are each other's derivative, and so are `enter` and `leave`, and the last two (DeepSpeed-Ulysses,
Jacobs et al. 2023, section 3.1). Sequences need not be a multiple of the ranks: the first ranks have one position more.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_hybrid.parts.placement import Shard, shard_tensor
from lightning_hybrid.step.instrument.user_activation_checkpointing import SAVES_EACH
from lightning_hybrid.step.standins.lazy_full_tensor import LazyFullTensor
from lightning_hybrid.step.standins.sharded_tensor_base import materialize
from lightning_hybrid.tensor.collectives.rank_collectives import ExchangingRanks


@dataclass(frozen=True)
class SequenceSharding:
    """The sharding of a sequence over ranks: one contiguous range of positions for each.

    Attributes:
        dim: The dim of values that holds the positions.
        length: Number of positions of the full sequence.
        ranks: The ranks that it is sharded over; no more than there are positions.
    """

    dim: int
    length: int
    ranks: ExchangingRanks

    @property
    def lengths(self) -> list[int]:
        """Number of positions of each rank."""
        each, more = divmod(self.length, self.ranks.size)
        return [each + (rank < more) for rank in range(self.ranks.size)]

    @property
    def local_length(self) -> int:
        """Number of positions of this rank."""
        return self.lengths[self.ranks.rank]

    def is_same(self, other: SequenceSharding | TwoLevelSharding) -> bool:
        """Whether the other sharding gives this rank the same positions."""
        return (
            isinstance(other, SequenceSharding)
            and (self.dim, self.length) == (other.dim, other.length)
            and self.ranks is other.ranks
        )

    def local_positions(self, full: Tensor) -> Tensor:
        """This rank's positions of a tensor with ``length`` positions in ``dim``, as a contiguous tensor."""
        lengths = self.lengths
        return full.narrow(self.dim, sum(lengths[: self.ranks.rank]), lengths[self.ranks.rank]).contiguous()

    def gathered(self, local: Tensor) -> Tensor:
        """All-gathers the full sequence from each rank's ``local_length`` positions."""
        lengths = self.lengths
        short = max(lengths) - local.shape[self.dim]
        if short:  # gathered tensors have one shape
            shape = list(local.shape)
            shape[self.dim] = short
            local = torch.cat([local, local.new_zeros(shape)], self.dim)
        shards = self.ranks.all_gather(local.contiguous())
        return torch.cat([shard.narrow(self.dim, 0, n) for shard, n in zip(shards, lengths, strict=True)], self.dim)

    def scatter(self, full: Tensor) -> list[Tensor]:
        """Sends each rank its positions of this rank's value; returns this rank's positions of each rank's value."""
        shards = [shard.contiguous() for shard in full.split(self.lengths, self.dim)]
        return self.ranks.exchange(shards, [shards[self.ranks.rank].shape] * self.ranks.size)

    def summed(self, addend: Tensor) -> Tensor:
        """Reduce-scatters: this rank's positions of the sum of the ranks' addends, which have all positions."""
        total, *rest = self.scatter(addend)
        for shard in rest:
            total = total + shard
        return total


@dataclass(frozen=True)
class TwoLevelSharding:
    """A sequence sharded over context ranks, and each shard sharded again over the tensor ranks of its context rank.

    Attributes:
        outer: The full sequence over context ranks.
        inner: The shard of this context rank over its tensor ranks.
    """

    outer: SequenceSharding
    inner: SequenceSharding

    @classmethod
    def of(cls, dim: int, length: int, context: ExchangingRanks, ranks: ExchangingRanks) -> TwoLevelSharding:
        """Shards ``length`` positions in ``dim`` over the context ranks, then over the tensor ranks."""
        outer = SequenceSharding(dim, length, context)
        return cls(outer, SequenceSharding(dim, outer.local_length, ranks))

    @property
    def dim(self) -> int:
        """The dim of values that holds the positions."""
        return self.outer.dim

    @property
    def length(self) -> int:
        """Number of positions of the full sequence."""
        return self.outer.length

    @property
    def local_length(self) -> int:
        """Number of positions of this rank."""
        return self.inner.local_length

    def is_same(self, other: SequenceSharding | TwoLevelSharding) -> bool:
        """Whether the other sharding gives this rank the same positions."""
        if isinstance(other, SequenceSharding):
            return False
        return self.outer.is_same(other.outer) and self.inner.is_same(other.inner)

    def local_positions(self, full: Tensor) -> Tensor:
        """This rank's positions of a tensor with ``length`` positions in ``dim``."""
        return self.inner.local_positions(self.outer.local_positions(full))

    def gathered(self, local: Tensor) -> Tensor:
        """All-gathers the full sequence from each rank's ``local_length`` positions."""
        return self.outer.gathered(self.inner.gathered(local))

    def summed(self, addend: Tensor) -> Tensor:
        """Reduce-scatters over both axes."""
        return self.inner.summed(self.outer.summed(addend))


AnySharding = SequenceSharding | TwoLevelSharding


class _ShardSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, full: Tensor, sharding: AnySharding) -> Tensor:
        ctx.sharding = sharding
        return sharding.local_positions(full)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _GatherSequence.apply(grad, ctx.sharding), None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, sharding: AnySharding) -> Tensor:
        ctx.sharding = sharding
        return sharding.gathered(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _ShardSequence.apply(grad, ctx.sharding), None


class _Enter(_GatherSequence):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Leave.apply(grad, ctx.sharding), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, addend: Tensor, sharding: AnySharding) -> Tensor:
        ctx.sharding = sharding
        return sharding.summed(addend)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Enter.apply(grad, ctx.sharding), None


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, sharding: SequenceSharding, features: Shard) -> Tensor:
        ctx.sharding, ctx.features = sharding, features
        ranks = sharding.ranks
        shards = [shard_tensor(local, features, rank, ranks.size) for rank in range(ranks.size)]
        shapes = []
        for length in sharding.lengths:
            shape = list(shards[ranks.rank].shape)
            shape[sharding.dim] = length
            shapes.append(torch.Size(shape))
        return torch.cat(ranks.exchange(shards, shapes), sharding.dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _ToPositions.apply(grad, ctx.sharding, ctx.features), None, None


class _ToPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inside: Tensor, sharding: SequenceSharding, features: Shard) -> Tensor:
        ctx.sharding, ctx.features = sharding, features
        received = sharding.scatter(inside)
        shape = list(received[0].shape)
        shape[-1] = features.length
        local = inside.new_zeros(shape)
        for rank, shard in enumerate(received):
            start = 0
            for offset, length in features.ranges(rank, len(received)):
                # Where ranks hold the same heads, what they send is added up: these are gradients.
                local.narrow(-1, offset, length).add_(shard.narrow(-1, start, length))
                start += length
        return local

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _ToHeads.apply(grad, ctx.sharding, ctx.features), None, None


def leave(addend: Tensor, sharding: AnySharding) -> Tensor:
    """Reduce-scatters: this rank's positions of the sum of the ranks' addends, which have all positions."""
    return _Leave.apply(addend, sharding)


def to_heads(local: Tensor, sharding: SequenceSharding, features: Shard) -> Tensor:
    """All positions of this rank's features (the last dim), from this rank's positions of all features."""
    return _ToHeads.apply(local, sharding, features)


def to_positions(inside: Tensor, sharding: SequenceSharding, features: Shard) -> Tensor:
    """This rank's positions of all features, from all positions of this rank's features, which no other rank has."""
    return _ToPositions.apply(inside, sharding, features)


class SequenceShard(LazyFullTensor):
    """A lazy tensor of the full sequence's shape that holds this rank's positions; all are gathered when read.

    Attributes:
        local: This rank's positions.
        sharding: Which positions these are.
    """

    local: Tensor
    sharding: AnySharding
    _entered: Tensor | None
    _regathered: Tensor | None
    _saved: int

    @classmethod
    def of(cls, local: Tensor, sharding: AnySharding) -> SequenceShard:
        """The tensor of the full shape that stands for the ranks' local positions."""
        value: SequenceShard = _RepresentSequence.apply(local, sharding)
        value.local, value.sharding = local, sharding
        value._entered = value._gathered = value._regathered = None
        value._saved = 0
        return value

    def gather_shards(self) -> Tensor:
        """All positions, for code that does the same with them on every rank."""
        return gather_sequence(self.local, self.sharding)

    def entered(self) -> Tensor:
        """All positions, for a region, of whose work each rank does a share; gathered once."""
        if self._entered is None:
            self._entered = _Enter.apply(self.local, self.sharding)
        return self._entered

    def release(self) -> None:
        """Frees the gathered positions: the forward that needed them is over."""
        self._entered = None

    def regather_hooks(self) -> saved_tensors_hooks:
        """Hooks that save the local positions alone for the backward, and gather all again when they are needed."""
        storage = self.entered().untyped_storage().data_ptr()

        def pack(tensor: Tensor) -> Any:
            if tensor.untyped_storage().data_ptr() != storage:
                return tensor
            self._saved += 1
            return tensor.size(), tensor.stride(), tensor.storage_offset()

        def unpack(saved: Any) -> Tensor:
            return saved if isinstance(saved, Tensor) else self._regather().as_strided(*saved)

        return saved_tensors_hooks(pack, unpack)

    def _regather(self) -> Tensor:
        # Queries, keys and values read the same: it is gathered once for all of them.
        full = self.sharding.gathered(self.local.detach()) if self._regathered is None else self._regathered
        self._saved -= 1
        self._regathered = full if self._saved > 0 else None
        return full

    @property
    def is_current(self) -> bool:
        """Whether the gathered tensor has not been written in place."""
        return self._gathered is None or self._gathered._version == 0


class _RepresentSequence(torch.autograd.Function):
    """Makes a `SequenceShard`; code that torch does not show to it (an autograd function) gets gradients."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, sharding: AnySharding) -> SequenceShard:
        ctx.sharding = sharding
        shape = list(local.shape)
        shape[sharding.dim] = sharding.length
        value = SequenceShard(local, tuple(shape))
        assert isinstance(value, SequenceShard)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _ShardSequence.apply(grad, ctx.sharding), None


def gather_sequence(local: Tensor, sharding: AnySharding) -> Tensor:
    """All-gathers the full sequence, for code that does the same with it on every rank."""
    return _GatherSequence.apply(local, sharding)


def shard_sequence(value: Tensor, sharding: AnySharding) -> Tensor:
    """This rank's positions of a value that every rank has in full; a `SequenceShard` that matches needs no gather."""
    if isinstance(value, SequenceShard) and value.sharding.is_same(sharding) and value.is_current:
        return value.local
    return _ShardSequence.apply(materialize(value), sharding)


def save_local_shard(x: Tensor) -> AbstractContextManager[Any]:
    """Inside, each rank saves its local positions of ``x`` for the backward, if ``x`` is a `SequenceShard`."""
    if not isinstance(x, SequenceShard) or not torch.is_grad_enabled():
        return contextlib.nullcontext()
    hooks = _TOP_HOOKS(True)
    if hooks is not None and not hasattr(hooks[0], SAVES_EACH):
        return contextlib.nullcontext()  # other hooks that decide what is saved (a layer that is recomputed) go first
    return x.regather_hooks()


_TOP_HOOKS = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)
