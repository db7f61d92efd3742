"""Deferred tensors: sharded content that is gathered from several ranks only when it is read.

The user's code receives such a tensor; the full tensor is used where it leaves the run of a step (sent to another
stage, returned, kept on the module, passed to a metric).
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import Tensor

from lightning_hybrid.step.objects.pytree import flatten_call, rebuild_call


class ShardedTensorBase(Tensor):
    """A tensor that behaves as the full one and of which this rank has a local shard."""

    @abstractmethod
    def full_tensor(self) -> Tensor:
        """Gather the full plain tensor of this shape, differentiable; collective over the ranks that hold shards."""


def materialize(value: Any) -> Any:
    """The full tensor of a deferred tensor; other values unchanged."""
    return value.full_tensor() if isinstance(value, ShardedTensorBase) else value


def materialize_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with full tensors in place of deferred ones."""
    leaves, plain = flatten_call(args, kwargs)
    if not any(isinstance(leaf, ShardedTensorBase) for leaf in leaves):
        return args, kwargs
    return rebuild_call([materialize(leaf) for leaf in leaves], args, kwargs, plain)
