"""Which tensors are on the host, where all are on the CPU; host synchronisations, by their line.

A tensor is on the device unless it is known to be on the host: made by a statement of the package that names no device,
copied there by the package (`cpu()`, or `to` of what the text calls so), or computed from such tensors alone.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from harness.nccl.lines import Place, place
from harness.nccl.trace import Ops, Sync
from harness.python_group import tensors_in

# Operations whose result, or the size of it, the host reads.
_READS = {
    "_local_scalar_dense": "item",
    "nonzero": "nonzero",
    "equal": "equal",
    "is_nonzero": "bool",
    "masked_select": "masked_select",
    "_unique2": "unique",
    "unique_dim": "unique",
    "unique_consecutive": "unique",
    "bincount": "bincount",
}
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward", "_grouped_mm")
_VIEWS = ("detach", "alias", "view", "_unsafe_view", "t", "transpose", "select", "slice", "expand", "unsqueeze")
_MOST = 4096  # marks, before those of freed storages are dropped


class Marks(TorchDispatchMode):
    """Knows what is on the host, counts operations, and gives each host synchronisation to a recorder."""

    def __init__(self, recorder: Any) -> None:
        super().__init__()
        self._recorder = recorder
        self._host: dict[int, StorageWeakRef] = {}
        self._objects = threading.local()  # .on_host: whether objects are exchanged over gloo
        self.num_ops = self.num_products = 0

    def is_on_host(self, tensor: Tensor) -> bool:
        with torch._C.DisableTorchFunction():
            if tensor.layout is not torch.strided or not torch._C._has_storage(tensor):
                return False
            found = self._host.get(tensor.untyped_storage()._cdata)
        return found is not None and not found.expired()

    def mark(self, tensor: Tensor) -> None:
        with torch._C.DisableTorchFunction():
            if tensor.layout is torch.strided and torch._C._has_storage(tensor):
                storage = tensor.untyped_storage()
                self._host[storage._cdata] = StorageWeakRef(storage)  # which keeps the address from being used again
                if len(self._host) > _MOST:
                    self._host = {key: held for key, held in self._host.items() if not held.expired()}

    def unmark(self, tensor: Tensor) -> None:
        with torch._C.DisableTorchFunction():
            if tensor.layout is torch.strided and torch._C._has_storage(tensor):
                self._host.pop(tensor.untyped_storage()._cdata, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._opname
        given = list(tensors_in(args)) if name != "lift_fresh" else []
        away = [tensor for tensor in given if self.is_on_host(tensor)]
        is_host = bool(away) and len(away) == len(given)
        if given and not is_host and (what := _read(name, args, kwargs)):
            self.read(what)
        out = func(*args, **kwargs)
        if name in _VIEWS:
            return out
        self.num_ops += 1
        self.num_products += name in _PRODUCTS or name.startswith("_scaled_dot_product")
        if not given:
            is_host = self._is_made_on_host(place())
        for tensor in tensors_in((out,)):
            if is_host and not any(tensor is other for other in given):
                self.mark(tensor)
        return out

    def _is_made_on_host(self, at: Place) -> bool:
        if at.in_distributed:
            return self._exchanges_on_host
        return at.owner == "package" and "device" not in at.statement

    def read(self, what: str) -> None:
        """The host reads a value of the device."""
        at = place()
        if not (at.in_optimizer or (at.in_distributed and self._exchanges_on_host)):
            self._recorder.add(Sync(what, at.line, self._recorder.thread))

    @property
    def _exchanges_on_host(self) -> bool:
        return bool(getattr(self._objects, "on_host", False))

    @contextlib.contextmanager
    def exchanging(self, *, on_host: bool) -> Iterator[None]:
        """Objects are exchanged inside, whose pickles are where the group is."""
        before, self._objects.on_host = self._exchanges_on_host, on_host
        try:
            yield
        finally:
            self._objects.on_host = before

    def ops(self) -> Ops | None:
        """Those since the last call."""
        count, products = self.num_ops, self.num_products
        self.num_ops = self.num_products = 0
        return Ops(count, products=products) if count else None


def _read(name: str, args: Any, kwargs: Any) -> str:
    if name in _READS:
        return _READS[name]
    if name == "repeat_interleave" and kwargs.get("output_size") is None:
        return "repeat_interleave"
    if name in ("index", "index_put", "index_put_"):
        by_mask = any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        return "index by mask" if by_mask and not (name != "index" and args[2].numel() == 1) else ""
    return ""


@contextlib.contextmanager
def marked(marks: Marks) -> Iterator[None]:
    """Inside, `cpu`, `to` and `tolist` of the package know the host from the device."""
    cpu, to, tolist = Tensor.cpu, Tensor.to, Tensor.tolist

    def is_plain(tensor: Tensor) -> bool:
        return type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu"

    def to_host(tensor: Tensor) -> Tensor:
        if marks.is_on_host(tensor):
            return tensor
        marks.read("cpu")
        copied = tensor.clone()
        marks.mark(copied)
        return copied

    def cpu_of(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found = cpu(self, *args, **kwargs)
        return to_host(found) if is_plain(self) and place().owner == "package" else found

    def moved(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found = to(self, *args, **kwargs)
        named = any(isinstance(each, str | torch.device) for each in (*args, kwargs.get("device")))
        if not named or not is_plain(found) or (at := place()).owner != "package":
            return found
        if '"cpu"' in at.statement or "HOST" in at.statement:
            return to_host(found)
        if marks.is_on_host(found) and not at.in_distributed:
            found = found.clone()
            marks.unmark(found)
        return found

    def listed(self: Tensor) -> Any:
        if is_plain(self) and not marks.is_on_host(self):
            marks.read("tolist")
        return tolist(self)

    changed: dict[str, Any] = {"cpu": cpu_of, "to": moved, "tolist": listed}
    try:
        for name, function in changed.items():
            setattr(Tensor, name, function)
        with marks:
            yield
    finally:
        for name in changed:
            delattr(Tensor, name)  # torch._C.TensorBase has them
