"""Lazy tensors of a full sequence's shape that hold this rank's positions."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_hybrid.step.standins.tensors import LazyFullTensor, materialize
from lightning_hybrid.tensor.collectives.sequence_sharding_and_collectives import (
    AnySharding,
    enter,
    gather_sequence,
    local_positions,
)


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
        """The full shape, for code that does the same with it on every rank."""
        return gather_sequence(self.local, self.sharding)

    def entered(self) -> Tensor:
        """The full shape, for a region, of whose work each rank does a share; gathered once."""
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

    def _regather(self) -> Tensor:
        # Queries, keys and values read the same: it is gathered once for all of them.
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
