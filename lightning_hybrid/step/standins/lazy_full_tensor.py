"""A lazy full tensor: a rank holds a shard of it, and the full one is made when it is read.

To code that asks for its shape, dtype or device it is the whole tensor. Whatever else is done to it is done to the
whole, which is made then, by an exchange between the ranks that hold the parts, and kept. Code that knows what it is
takes the part instead, so that between two who know nothing is exchanged at all.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.step.standins.deferred_tensors import Deferred

# What is known of the whole without its content. Everything else asks for the whole.
_METADATA = frozenset(
    {
        "shape", "dtype", "device", "layout", "ndim", "requires_grad", "itemsize", "names", "_version",
        "is_cuda", "is_cpu", "is_meta", "is_mps", "is_xpu", "is_sparse", "is_quantized", "is_nested", "is_mkldnn",
        "size", "dim", "ndimension", "numel", "nelement", "__len__", "element_size", "get_device",
        "is_floating_point", "is_complex", "is_contiguous", "stride",
    }
)  # fmt: skip


class Later(Deferred):
    """A tensor whose whole is made when it is looked at."""

    _made: Tensor | None

    @staticmethod
    def __new__(cls, part: Tensor, shape: tuple[int, ...]) -> Later:
        """One without a graph, for the forward of an autograd function; its backward gets the whole's gradient."""
        later = Tensor._make_wrapper_subclass(cls, shape, dtype=part.dtype, device=part.device)
        later._made = None
        return later

    @abstractmethod
    def make(self) -> Tensor:
        """The whole, differentiable; collective over the ranks that hold parts."""

    def whole(self) -> Tensor:
        """The whole, made once."""
        if self._made is None:
            with torch._C.DisableTorchFunction():
                self._made = self.make()
        return self._made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer from the metadata, or work on the whole."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = func.__self__.__name__
        if name in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return func(*_with_wholes(args), **{key: _with_wholes(value) for key, value in kwargs.items()})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Nothing comes here with the part alone."""
        return func(*_with_wholes(args), **{key: _with_wholes(value) for key, value in (kwargs or {}).items()})


def _with_wholes(value: Any) -> Any:
    if isinstance(value, Later):
        return value.whole()
    if type(value) in (tuple, list):
        return type(value)(_with_wholes(item) for item in value)
    return value
