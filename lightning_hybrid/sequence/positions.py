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
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_hybrid.collectives.tensors import LinearMap, Map
from lightning_hybrid.params.placement import Shard, shard_tensor
from lightning_hybrid.step.standins.tensors import LazyFullTensor, materialize
from lightning_hybrid.tensor.collectives import Arriving, Ranks


@dataclass(frozen=True)
class SequenceSharding:
    """The sharding of a sequence over ranks: one contiguous range of positions for each. Equal for the same ranges."""

    dim: int  # the dim of values that holds the positions
    length: int  # number of positions of the full sequence
    ranks: Ranks  # the ranks that it is sharded over; no more than there are positions

    @property
    def lengths(self) -> list[int]:
        """Number of positions of each rank."""
        each, more = divmod(self.length, self.ranks.size)
        return [each + (rank < more) for rank in range(self.ranks.size)]

    @property
    def local_length(self) -> int:
        """Number of positions of this rank."""
        return self.lengths[self.ranks.rank]

    def local_positions(self, full: Tensor) -> Tensor:
        """This rank's positions, contiguous, of a tensor of any shape with ``length`` positions in ``dim``."""
        lengths = self.lengths
        local = full.narrow(self.dim, sum(lengths[: self.ranks.rank]), lengths[self.ranks.rank])
        # No view, which autograd would not let change in place as a result of its function.
        return local.clone(memory_format=torch.contiguous_format)

    def gathered(self, local: Tensor) -> Tensor:
        """All-gathers the full shape, with ``length`` positions, from each rank's ``local_length`` positions."""
        return self._joined(self.ranks.all_gather(self._of_one_shape(local)))

    def start_gather(self, local: Tensor) -> Arriving:
        """Begins to gather, from each rank's ``local_length`` positions, what `arrived` makes the full shape of."""
        return self.ranks.start_all_gather(self._of_one_shape(local))

    def arrived(self, arriving: Arriving) -> Tensor:
        """The full shape, with ``length`` positions, as `gathered`."""
        return self._joined(arriving.wait())

    def _of_one_shape(self, local: Tensor) -> Tensor:
        """The local positions, and as many more as the largest shard has."""
        short = self.lengths[0] - local.shape[self.dim]
        if short:
            local = torch.cat([local, local.new_zeros(_with_size(local, self.dim, short))], self.dim)
        return local.contiguous()

    def _joined(self, shards: Iterable[Tensor]) -> Tensor:
        """The full shape from the shards of all ranks, all of the shape of the largest."""
        pairs = zip(shards, self.lengths, strict=True)
        return torch.cat([shard.narrow(self.dim, 0, length) for shard, length in pairs], self.dim)

    def scatter(self, full: Tensor) -> list[Tensor]:
        """Sends each rank its positions of the full shape; returns ``local_length`` positions of each rank's value."""
        shards = list(full.split(self.lengths, self.dim))
        return self.ranks.exchange(shards, [shards[self.ranks.rank].shape] * self.ranks.size)

    def summed(self, addend: Tensor) -> Tensor:
        """Reduce-scatters: this rank's positions of the sum of the ranks' addends, which have the full shape."""
        return self.ranks.reduce_scatter(list(addend.split(self.lengths, self.dim)))


@dataclass(frozen=True)
class TwoLevelSharding:
    """A sequence sharded over context ranks, and each shard sharded again over the tensor ranks of its context rank."""

    outer: SequenceSharding  # the full sequence over context ranks
    inner: SequenceSharding  # the shard of this context rank over its tensor ranks

    @classmethod
    def of(cls, dim: int, length: int, context: Ranks, ranks: Ranks) -> TwoLevelSharding:
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

    def local_positions(self, full: Tensor) -> Tensor:
        """This rank's positions of a tensor of any shape with ``length`` positions in ``dim``."""
        return self.inner.local_positions(self.outer.local_positions(full))

    def gathered(self, local: Tensor) -> Tensor:
        """All-gathers the full shape, with ``length`` positions, from each rank's ``local_length`` positions."""
        return self.outer.gathered(self.inner.gathered(local))

    def summed(self, addend: Tensor) -> Tensor:
        """Reduce-scatters addends of the full shape over both axes, to ``local_length`` positions."""
        return self.inner.summed(self.outer.summed(addend))


AnySharding = SequenceSharding | TwoLevelSharding


def local_positions(full: Tensor, sharding: AnySharding) -> Tensor:
    """This rank's ``local_length`` positions of a value of the full shape that every rank has."""
    return LinearMap.apply(full, sharding.local_positions, sharding.gathered)


def gather_sequence(local: Tensor, sharding: AnySharding) -> Tensor:
    """All-gathers ``local_length`` positions to the full shape, for code that does the same on every rank."""
    return LinearMap.apply(local, sharding.gathered, sharding.local_positions)


def enter(local: Tensor, sharding: AnySharding) -> Tensor:
    """All-gathers ``local_length`` positions to the full shape, for a region; each rank does a share of its work."""
    return LinearMap.apply(local, sharding.gathered, sharding.summed)


def leave(addend: Tensor, sharding: AnySharding, read: Sequence[SequenceShard] = ()) -> Tensor:
    """Reduce-scatters: this rank's positions of the sum of the ranks' addends, which have the full shape.

    The backward begins here to gather again what the region has ``read``, and needs at its end.
    """

    def gathered(grad: Tensor) -> Tensor:
        full = sharding.gathered(grad)
        for shard in read:
            shard.prefetch()
        return full

    return LinearMap.apply(addend, sharding.summed, gathered if read else sharding.gathered)


def to_heads(local: Tensor, sharding: SequenceSharding, features: Shard) -> Tensor:
    """``(..., local positions, ..., features)`` to ``(..., positions, ..., local features)``: all-to-all."""
    return LinearMap.apply(local, *_exchanges(sharding, features))


def to_positions(inside: Tensor, sharding: SequenceSharding, features: Shard) -> Tensor:
    """``(..., positions, ..., local features)``, none on two ranks, to ``(..., local positions, ..., features)``."""
    return LinearMap.apply(inside, *reversed(_exchanges(sharding, features)))


def _exchanges(sharding: SequenceSharding, features: Shard) -> tuple[Map, Map]:
    options: Any = {"sharding": sharding, "features": features}
    return partial(_positions_to_features, **options), partial(_features_to_positions, **options)


def _positions_to_features(local: Tensor, sharding: SequenceSharding, features: Shard) -> Tensor:
    ranks = sharding.ranks
    shards = [shard_tensor(local, features, rank, ranks.size) for rank in range(ranks.size)]
    shapes = [_with_size(shards[ranks.rank], sharding.dim, length) for length in sharding.lengths]
    return torch.cat(ranks.exchange(shards, shapes), sharding.dim)


def _features_to_positions(inside: Tensor, sharding: SequenceSharding, features: Shard) -> Tensor:
    received = sharding.scatter(inside)
    local = inside.new_zeros(_with_size(received[0], -1, features.length))
    for rank, shard in enumerate(received):
        start = 0
        for offset, length in features.ranges(rank, len(received)):
            # Where ranks hold the same heads, what they send is added up: these are gradients.
            local.narrow(-1, offset, length).add_(shard.narrow(-1, start, length))
            start += length
    return local


def _with_size(tensor: Tensor, dim: int, size: int) -> torch.Size:
    shape = list(tensor.shape)
    shape[dim] = size
    return torch.Size(shape)


class SequenceShard(LazyFullTensor):
    """A lazy tensor of the full sequence's shape that holds this rank's positions; all are gathered when read."""

    local: Tensor  # this rank's positions
    sharding: AnySharding  # which positions these are
    _entered: Tensor | None
    _regathered: Tensor | None
    _arriving: list[Arriving]  # one at most
    _saved: int

    @classmethod
    def of(cls, local: Tensor, sharding: AnySharding) -> SequenceShard:
        """The tensor of the full shape that stands for the ranks' local positions."""
        value: SequenceShard = _RepresentSequence.apply(local, sharding)
        value.local, value.sharding = local, sharding
        value._entered = value._gathered = value._regathered = None
        value._saved, value._arriving = 0, []
        return value

    def gather_shards(self) -> Tensor:
        """The full shape, for code that does the same with it on every rank."""
        return gather_sequence(self.local, self.sharding)

    def entered(self) -> Tensor:
        """The full shape, for a region; each rank does a share of its work. Gathered once."""
        if self._entered is None:
            self._entered = enter(self.local, self.sharding)
        return self._entered

    def release(self) -> None:
        """Frees the gathered positions: the forward that needed them is over."""
        self._entered = None

    def regather_hooks(self) -> saved_tensors_hooks:
        """Hooks that save the local positions alone for the backward, and gather all again when they are needed."""
        storage = self.entered().untyped_storage()._cdata

        def pack(tensor: Tensor) -> Any:
            if tensor.untyped_storage()._cdata != storage:
                return tensor
            self._saved += 1
            return tensor.size(), tensor.stride(), tensor.storage_offset()

        def unpack(saved: Any) -> Tensor:
            return saved if isinstance(saved, Tensor) else self._regather().as_strided(*saved)

        return saved_tensors_hooks(pack, unpack)

    def prefetch(self) -> None:
        """Begins to gather the positions that a backward will need, if it is to run under what comes before."""
        sharding = self.sharding
        if self._arriving or self._saved <= 0 or not isinstance(sharding, SequenceSharding):
            return
        if sharding.ranks.overlaps:
            self._arriving.append(sharding.start_gather(self.local.detach()))

    def _regather(self) -> Tensor:
        # Queries, keys and values read the same: it is gathered once for all of them.
        if self._arriving and isinstance(self.sharding, SequenceSharding):
            self._regathered = self.sharding.arrived(self._arriving.pop())
        full = self.sharding.gathered(self.local.detach()) if self._regathered is None else self._regathered
        self._saved -= 1
        self._regathered = full if self._saved > 0 else None
        return full


class _RepresentSequence(torch.autograd.Function):
    """Makes a `SequenceShard`; code that torch does not show to it (an autograd function) gets gradients."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, sharding: AnySharding) -> SequenceShard:
        """The lazy tensor of the full shape."""
        ctx.sharding = sharding
        shape = list(local.shape)
        shape[sharding.dim] = sharding.length
        value = SequenceShard(local, tuple(shape))
        assert isinstance(value, SequenceShard)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """This rank's positions of the gradient, which has the full shape."""
        return local_positions(grad, ctx.sharding), None


def shard_sequence(value: Tensor, sharding: AnySharding) -> Tensor:
    """This rank's positions of a full shape that every rank has; a `SequenceShard` that matches needs no gather."""
    if (
        isinstance(value, SequenceShard)
        and value.sharding == sharding
        and (value._gathered is None or value._gathered._version == 0)  # not written in place
    ):
        return value.local
    return local_positions(materialize(value), sharding)


def save_local_shard(x: Tensor) -> AbstractContextManager[Any]:
    """Inside, each rank saves its positions of ``x``, of any shape, for the backward, if it is a `SequenceShard`."""
    if not isinstance(x, SequenceShard) or not torch.is_grad_enabled():
        return contextlib.nullcontext()
    if _TOP_HOOKS(True) is not None:
        return contextlib.nullcontext()  # other hooks that decide what is saved (a layer that is recomputed) go first
    return x.regather_hooks()


_TOP_HOOKS = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)
