"""What kernels make of stand-ins, once it has been seen: tensors whose shapes follow from those of the arguments.

Torch's fake kernels take a quarter of a millisecond to two, nearly all of it to find out that nothing is special. Here
a kernel that was seen to make fresh tensors, or one view of its first argument, is not asked again about arguments of
the same shapes. Of new shapes the commonest kernels are asked straight (``asked_on_meta``). Kernels that write, and
whatever depends on contents, are asked each time.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

from lightning_hybrid.step.absent import FAKE_MODE, make_fresh, make_view
from lightning_hybrid.step.tree import memory_of

_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
_BY_CONTENT = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
_MOST = 1 << 14
_ATEN = torch.ops.aten
# Kernels whose result on the meta device, which C++ tells at once, is all that torch's fake kernels would say of it.
_ON_META = frozenset(
    {
        _ATEN.mm.default, _ATEN.addmm.default, _ATEN.bmm.default, _ATEN.baddbmm.default,
        _ATEN.view.default, _ATEN.t.default, _ATEN.transpose.int, _ATEN.permute.default,
        _ATEN.expand.default, _ATEN.squeeze.dim, _ATEN.unsqueeze.default, _ATEN.slice.Tensor, _ATEN.select.int,
        _ATEN.add.Tensor, _ATEN.sub.Tensor, _ATEN.mul.Tensor, _ATEN.div.Tensor, _ATEN.pow.Tensor_Scalar,
        _ATEN.neg.default, _ATEN.rsqrt.default, _ATEN.tanh.default, _ATEN.sigmoid.default, _ATEN.gelu.default,
        _ATEN.silu.default, _ATEN.relu.default, _ATEN._softmax.default, _ATEN._log_softmax.default,
    }
)  # fmt: skip


class _Made(NamedTuple):
    """One result: what ``make_fresh`` is given."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class _Seen(NamedTuple):
    """A view of the first argument: what ``make_view`` is given."""

    made: _Made
    offset: int


class KnownKernels:
    """Remembers, as torch's own cache of fake kernels does, for as long as the process lives."""

    def __init__(self) -> None:
        """Nothing has been seen."""
        self._known: dict[Hashable, _Made | _Seen | list[_Made]] = {}

    def key_of(self, func: Any, args: Any, kwargs: Any) -> Hashable | None:
        """Equal for calls with the same result; None where nothing can be known.

        Args:
            func: The kernel.
            args: Its arguments.
            kwargs: Likewise.
        """
        if func._schema.is_mutable or not _BY_CONTENT.isdisjoint(func.tags):
            return None
        parts: list[Any] = [func, torch.get_default_dtype()]
        if func.is_view:
            if type(args[0]) is not FakeTensor:
                return None
            parts.append(args[0].storage_offset())
        if not _describe(args, parts) or (kwargs and not _describe(sorted(kwargs.items()), parts)):
            return None
        return tuple(parts)

    def again(self, key: Hashable, args: Any) -> Any:
        """The result of a call with this key; None if there was none yet.

        Args:
            key: Of the call.
            args: Its arguments.
        """
        known = self._known.get(key)
        if known is None:
            return None
        if isinstance(known, _Made):
            return make_fresh(*known)
        if isinstance(known, _Seen):
            return make_view(args[0], *known.made, known.offset)
        return tuple([make_fresh(*made) for made in known])

    def learn(self, key: Hashable, args: Any, out: Any, *, is_view: bool) -> None:
        """Remember a result, if it is of the kind that can be made again.

        Args:
            key: Of the call.
            args: Its arguments, those given by name last.
            out: What it returned.
            is_view: Whether the kernel makes views.
        """
        results = out if type(out) is tuple else (out,)
        if any(type(tensor) is not FakeTensor or not _is_plain(tensor) or tensor.requires_grad for tensor in results):
            return
        if len(self._known) == _MOST:
            self._known.clear()
        made = [_Made(tuple(t.shape), t.stride(), t.dtype, t.fake_device) for t in results]
        memories = {memory_of(tensor) for tensor in results}
        if is_view:
            if type(out) is FakeTensor and memories == {memory_of(args[0])} and out.dtype is args[0].dtype:
                self._known[key] = _Seen(made[0], int(out.storage_offset()))
            return
        fresh = len(memories) == len(made) and memories.isdisjoint(memory_of(tensor) for tensor in _tensors(args))
        if fresh and not any(tensor.storage_offset() for tensor in results):
            self._known[key] = made if type(out) is tuple else made[0]


@torch.no_grad()
def asked_on_meta(func: Any, args: Any, kwargs: Any) -> FakeTensor | None:
    """What one of the commonest kernels makes of stand-ins on one device; None where torch's fake one is to be asked.

    Args:
        func: The kernel; ``KnownKernels.key_of`` has a key for the call.
        args: Its arguments.
        kwargs: Likewise.
    """
    if func not in _ON_META or kwargs:
        return None
    tensors = _tensors(args)
    devices = {tensor.fake_device if isinstance(tensor, FakeTensor) else None for tensor in tensors}
    device = devices.pop()
    if devices or device is None:
        return None
    try:
        with in_kernel_invocation_manager(FAKE_MODE):
            made = func(*args)
    except Exception:  # the fake kernel says what is wrong
        return None
    return FakeTensor(FAKE_MODE, made, device)


def _describe(values: Any, parts: list[Any]) -> bool:
    """Append what is to be known of arguments; False if one of them is no plain value and no plain stand-in."""
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if not _is_plain(value):
                return False
            parts += (value.shape, value.stride(), value.dtype, value.fake_device)
        elif kind is Tensor:  # of the batch
            if value.layout is not torch.strided or value.dtype.is_complex or value.is_neg():
                return False
            parts += (Tensor, value.shape, value.stride(), value.dtype, value.device)
        elif kind in _PLAIN:
            if kind is float and value != value:  # equals nothing
                return False
            parts += (kind, value)
        elif isinstance(value, list | tuple):
            parts.append(len(value))
            if not _describe(value, parts):
                return False
        else:
            return False
    return True


def _is_plain(tensor: FakeTensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.fake_mode is FAKE_MODE
        and tensor.constant is None
        and not tensor.dtype.is_complex
        and not tensor.is_neg()
    )


def _tensors(values: Any) -> list[Tensor]:
    return [
        tensor
        for value in values
        for tensor in (_tensors(value) if isinstance(value, list | tuple) else [value])
        if isinstance(tensor, Tensor)
    ]
