"""A lazy full tensor: a rank holds a shard of it, and the full tensor is gathered when it is read.

Its shape, dtype and device are those of the full tensor. Any other operation runs on the full tensor, which is gathered
from the ranks that hold the shards, and cached. Code that supports the class uses the shard instead, so that nothing is
communicated between two such layers.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.step.objects.op_names import METADATA
from lightning_hybrid.step.standins.sharded_tensor_base_class import ShardedTensorBase


class LazyFullTensor(ShardedTensorBase):
    """A tensor of the full shape that is gathered when its content is read."""

    _gathered: Tensor | None

    @staticmethod
    def __new__(cls, shard: Tensor, shape: tuple[int, ...]) -> LazyFullTensor:
        """Create it without a graph, in the forward of an autograd function; the backward gets the full gradient."""
        lazy = Tensor._make_wrapper_subclass(cls, shape, dtype=shard.dtype, device=shard.device)
        lazy._gathered = None
        return lazy

    @abstractmethod
    def gather_shards(self) -> Tensor:
        """Gather the full tensor, of this shape, differentiable; collective over the ranks that hold shards."""

    def full_tensor(self) -> Tensor:
        """The full tensor, of the shape of this one, gathered once and cached."""
        if self._gathered is None:
            with torch._C.DisableTorchFunction():
                self._gathered = self.gather_shards()
        return self._gathered

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = func.__self__.__name__
        if name in METADATA:  # everything else gathers the full tensor
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return func(*_materialized(args), **{key: _materialized(value) for key, value in kwargs.items()})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return func(*_materialized(args), **{key: _materialized(value) for key, value in (kwargs or {}).items()})


def _materialized(value: Any) -> Any:
    if isinstance(value, LazyFullTensor):
        return value.full_tensor()
    if type(value) in (tuple, list):
        return type(value)(_materialized(item) for item in value)
    return value
