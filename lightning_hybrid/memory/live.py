"""Bytes of storages that are alive, counted on tensors as operations make and release storages.

They are the same on every device, unlike those of an allocator. What is not seen: the workspace of kernels, memory of
other libraries, and tensors that existed before and are not passed to `track`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_hybrid.step.objects.tensors import storage_id


class LiveBytes(TorchDispatchMode):
    """Counts the storages that are made inside, or passed to it.

    Attributes:
        now: Bytes that are alive.
        peak: The most since `begin_interval`.
    """

    only_watches = True

    def __init__(self, device: torch.device) -> None:
        """Count storages of the type of ``device``."""
        super().__init__()
        self._device_type = device.type
        self._storages: dict[int, _Counted] = {}
        self.now = self.peak = 0

    def track(self, tensors: Iterable[Tensor]) -> None:
        """Count the storages of tensors of any shape that exist already."""
        with torch._C.DisableTorchFunction():  # a hook would gather them
            for tensor in tensors:
                self._add(tensor)

    def add_constant(self, nbytes: int) -> None:
        """Count bytes that stay."""
        self.now += nbytes
        self.peak = max(self.peak, self.now)

    def begin_interval(self) -> int:
        """Return the peak since the last call, and begin with the bytes that are alive now."""
        peak, self.peak = self.peak, self.now
        return peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self._add(out)
        elif isinstance(out, tuple | list):
            for each in pytree.tree_leaves(out):
                if isinstance(each, Tensor):
                    self._add(each)
        return out

    def _add(self, tensor: Tensor) -> None:
        if tensor.layout is not torch.strided or type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            return
        storage = tensor.untyped_storage()
        if storage.device.type != self._device_type:
            return
        address, nbytes = storage_id(tensor), storage.nbytes()
        counted = self._storages.get(address)
        if counted is None:
            counted = self._storages[address] = _Counted()
            counted.reference = weakref.ref(storage, lambda _: self._remove(address, counted))
        self.now += nbytes - counted.nbytes  # a storage may be resized
        counted.nbytes = nbytes
        self.peak = max(self.peak, self.now)

    def _remove(self, address: int, counted: _Counted) -> None:
        self.now -= counted.nbytes
        if self._storages.get(address) is counted:
            del self._storages[address]


class _Counted:
    """A storage, and the bytes of it that are counted."""

    __slots__ = ("nbytes", "reference")

    def __init__(self) -> None:
        self.nbytes = 0
        self.reference: Any = None
