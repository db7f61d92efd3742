"""Collectives over shards of a sequence (sequence and context parallelism), with their gradients.

    deal        forward: take one's own positions    backward: gather all positions
    collect     forward: gather all positions        backward: take one's own (the gradient is equal on all ranks)
    enter       forward: gather all positions        backward: sum over ranks, keep one's own positions
    leave       forward: sum over ranks, keep one's own positions        backward: gather all positions
    to heads    forward: all positions of one's own features       backward: to positions
    to positions    forward: one's own positions, all features     backward: to heads

`deal` and `collect` are each other's derivative, and so are `enter` and `leave`, and the last two (DeepSpeed-Ulysses,
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

from lightning_hybrid.parts.placement import Shard, cut
from lightning_hybrid.step.instrument.activation_checkpointing import SAVES_EACH
from lightning_hybrid.step.standins.deferred_tensors import whole_of
from lightning_hybrid.step.standins.lazy_full_tensor import Later
from lightning_hybrid.tensor.collectives.rank_collectives import ExchangingRanks


@dataclass(frozen=True)
class Dealt:
    """How the positions of a sequence are dealt.

    Attributes:
        dim: The dim of values that holds the positions.
        length: Number of positions.
        ranks: Who shares them; no more than there are positions.
    """

    dim: int
    length: int
    ranks: ExchangingRanks

    @property
    def lengths(self) -> list[int]:
        """How many positions each rank has."""
        each, more = divmod(self.length, self.ranks.size)
        return [each + (rank < more) for rank in range(self.ranks.size)]

    @property
    def local_length(self) -> int:
        """How many positions this rank has."""
        return self.lengths[self.ranks.rank]

    def is_alike(self, other: Dealt | DealtTwice) -> bool:
        """Whether the same positions are this rank's."""
        return (
            isinstance(other, Dealt)
            and (self.dim, self.length) == (other.dim, other.length)
            and self.ranks is other.ranks
        )

    def own(self, whole: Tensor) -> Tensor:
        """This rank's positions."""
        lengths = self.lengths
        return whole.narrow(self.dim, sum(lengths[: self.ranks.rank]), lengths[self.ranks.rank]).contiguous()

    def gathered(self, local: Tensor) -> Tensor:
        """All positions."""
        lengths = self.lengths
        short = max(lengths) - local.shape[self.dim]
        if short:  # gathered tensors have one shape
            shape = list(local.shape)
            shape[self.dim] = short
            local = torch.cat([local, local.new_zeros(shape)], self.dim)
        parts = self.ranks.all_gather(local.contiguous())
        return torch.cat([part.narrow(self.dim, 0, n) for part, n in zip(parts, lengths, strict=True)], self.dim)

    def summed(self, addend: Tensor) -> Tensor:
        """This rank's positions of the sum of the ranks' addends."""
        parts = [part.contiguous() for part in addend.split(self.lengths, self.dim)]
        shape = parts[self.ranks.rank].shape
        received = self.ranks.exchange(parts, [shape] * self.ranks.size)
        total = received[0]
        for part in received[1:]:
            total = total + part
        return total


@dataclass(frozen=True)
class DealtTwice:
    """How what context ranks have of a sequence is dealt once more, to the tensor ranks of each.

    Attributes:
        outer: To context ranks.
        inner: What this context rank has, to its tensor ranks.
    """

    outer: Dealt
    inner: Dealt

    @classmethod
    def of(cls, dim: int, length: int, context: ExchangingRanks, ranks: ExchangingRanks) -> DealtTwice:
        """Args: dim, length: of the whole sequence. context, ranks: context ranks and tensor ranks."""
        outer = Dealt(dim, length, context)
        return cls(outer, Dealt(dim, outer.local_length, ranks))

    @property
    def dim(self) -> int:
        """See `Dealt`."""
        return self.outer.dim

    @property
    def length(self) -> int:
        """See `Dealt`."""
        return self.outer.length

    @property
    def local_length(self) -> int:
        """See `Dealt`."""
        return self.inner.local_length

    def is_alike(self, other: Dealt | DealtTwice) -> bool:
        """See `Dealt`."""
        return isinstance(other, DealtTwice) and self.outer.is_alike(other.outer) and self.inner.is_alike(other.inner)

    def own(self, whole: Tensor) -> Tensor:
        """See `Dealt`."""
        return self.inner.own(self.outer.own(whole))

    def gathered(self, local: Tensor) -> Tensor:
        """See `Dealt`."""
        return self.outer.gathered(self.inner.gathered(local))

    def summed(self, addend: Tensor) -> Tensor:
        """See `Dealt`."""
        return self.inner.summed(self.outer.summed(addend))


AnyDealt = Dealt | DealtTwice


class _Deal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, dealt: AnyDealt) -> Tensor:
        ctx.dealt = dealt
        return dealt.own(whole)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Collect.apply(grad, ctx.dealt), None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, dealt: AnyDealt) -> Tensor:
        ctx.dealt = dealt
        return dealt.gathered(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Deal.apply(grad, ctx.dealt), None


class _Enter(_Collect):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Leave.apply(grad, ctx.dealt), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, addend: Tensor, dealt: AnyDealt) -> Tensor:
        ctx.dealt = dealt
        return dealt.summed(addend)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Enter.apply(grad, ctx.dealt), None


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, dealt: Dealt, features: Shard) -> Tensor:
        ctx.dealt, ctx.features = dealt, features
        ranks = dealt.ranks
        parts = [cut(local, features, rank, ranks.size) for rank in range(ranks.size)]
        shapes = []
        for length in dealt.lengths:
            shape = list(parts[ranks.rank].shape)
            shape[dealt.dim] = length
            shapes.append(torch.Size(shape))
        return torch.cat(ranks.exchange(parts, shapes), dealt.dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _ToPositions.apply(grad, ctx.dealt, ctx.features), None, None


class _ToPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inside: Tensor, dealt: Dealt, features: Shard) -> Tensor:
        ctx.dealt, ctx.features = dealt, features
        ranks = dealt.ranks
        parts = [part.contiguous() for part in inside.split(dealt.lengths, dealt.dim)]
        received = ranks.exchange(parts, [parts[ranks.rank].shape] * ranks.size)
        shape = list(parts[ranks.rank].shape)
        shape[-1] = features.length
        whole = inside.new_zeros(shape)
        for rank, part in enumerate(received):
            start = 0
            for place, length in features.ranges(rank, ranks.size):
                # Where ranks hold the same heads, what they send is added up: these are gradients.
                whole.narrow(-1, place, length).add_(part.narrow(-1, start, length))
                start += length
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _ToHeads.apply(grad, ctx.dealt, ctx.features), None, None


def leave(addend: Tensor, dealt: AnyDealt) -> Tensor:
    """This rank's positions of the sum of the ranks' addends."""
    return _Leave.apply(addend, dealt)


def to_heads(local: Tensor, dealt: Dealt, features: Shard) -> Tensor:
    """All positions of this rank's features (the last dim), from this rank's positions of all features."""
    return _ToHeads.apply(local, dealt, features)


def to_positions(inside: Tensor, dealt: Dealt, features: Shard) -> Tensor:
    """This rank's positions of all features, from all positions of this rank's features, which no other rank has."""
    return _ToPositions.apply(inside, dealt, features)


class OwnPositions(Later):
    """A value of which this rank has its own positions.

    Attributes:
        local: They.
        dealt: Which these are.
    """

    local: Tensor
    dealt: AnyDealt
    _entered: Tensor | None
    _again: Tensor | None
    _saved: int

    @classmethod
    def of(cls, local: Tensor, dealt: AnyDealt) -> OwnPositions:
        """A value made of the ranks' own positions."""
        value: OwnPositions = _Stand.apply(local, dealt)
        value.local, value.dealt = local, dealt
        value._entered = value._made = value._again = None
        value._saved = 0
        return value

    def make(self) -> Tensor:
        """All positions, for code that does the same with them on every rank."""
        return collect(self.local, self.dealt)

    def entered(self) -> Tensor:
        """All positions, for code of which each rank does its part; gathered once."""
        if self._entered is None:
            self._entered = _Enter.apply(self.local, self.dealt)
        return self._entered

    def release(self) -> None:
        """Forget all positions: the forward that needed them is over."""
        self._entered = None

    def regathered(self) -> saved_tensors_hooks:
        """What is saved for the backward inside is this rank's positions alone; all are gathered again when needed."""
        storage = self.entered().untyped_storage().data_ptr()

        def pack(tensor: Tensor) -> Any:
            if tensor.untyped_storage().data_ptr() != storage:
                return tensor
            self._saved += 1
            return tensor.size(), tensor.stride(), tensor.storage_offset()

        def unpack(saved: Any) -> Tensor:
            return saved if isinstance(saved, Tensor) else self._gathered_again().as_strided(*saved)

        return saved_tensors_hooks(pack, unpack)

    def _gathered_again(self) -> Tensor:
        # Queries, keys and values read the same: it is gathered once for all of them.
        whole = self.dealt.gathered(self.local.detach()) if self._again is None else self._again
        self._saved -= 1
        self._again = whole if self._saved > 0 else None
        return whole

    @property
    def is_current(self) -> bool:
        """Whether nobody has written to the whole."""
        return self._made is None or self._made._version == 0


class _Stand(torch.autograd.Function):
    """Makes what stands for the whole; code that torch does not show to it (an autograd function) gets gradients."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, dealt: AnyDealt) -> OwnPositions:
        ctx.dealt = dealt
        shape = list(local.shape)
        shape[dealt.dim] = dealt.length
        value = OwnPositions(local, tuple(shape))
        assert isinstance(value, OwnPositions)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Deal.apply(grad, ctx.dealt), None


def collect(local: Tensor, dealt: AnyDealt) -> Tensor:
    """All positions, for code that does the same with them on every rank."""
    return _Collect.apply(local, dealt)


def dealt_of(value: Tensor, dealt: AnyDealt) -> Tensor:
    """This rank's positions of a value that is whole on every rank; nothing is exchanged for one that was dealt so."""
    if isinstance(value, OwnPositions) and value.dealt.is_alike(dealt) and value.is_current:
        return value.local
    return _Deal.apply(whole_of(value), dealt)


def saved_in_parts(x: Tensor) -> AbstractContextManager[Any]:
    """Of a value whose positions are dealt, each rank saves its own for the backward."""
    if not isinstance(x, OwnPositions) or not torch.is_grad_enabled():
        return contextlib.nullcontext()
    hooks = _TOP_HOOKS(True)
    if hooks is not None and not hasattr(hooks[0], SAVES_EACH):
        return contextlib.nullcontext()  # others that decide what is saved (a layer that is recomputed) have the say
    return x.regathered()


_TOP_HOOKS = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)
