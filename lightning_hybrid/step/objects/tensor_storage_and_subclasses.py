"""The identity of a tensor's storage, and tensor subclasses of the user: plain memory with further attributes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass
from torch.utils._python_dispatch import _disable_current_modes


def is_user_subclass(value: Any) -> bool:
    """Whether ``value`` is of a user's tensor subclass (torchvision's images) without a ``__torch_dispatch__``."""
    kind = type(value)
    return (
        isinstance(value, Tensor)
        and kind is not Tensor
        and not isinstance(value, nn.Parameter)
        and kind.__torch_dispatch__ is Tensor.__torch_dispatch__
    )


def as_plain_tensor(value: Any) -> Any:
    """The same memory as a plain tensor, for kernels without support for the subclass; other values unchanged."""
    if not is_user_subclass(value):
        return value
    with _disable_current_modes(), DisableTorchFunctionSubclass():
        return value.as_subclass(Tensor)


def on_host(value: Any) -> Any:
    """The content of a tensor of any shape in the memory of the host; other values unchanged."""
    return value.detach().cpu() if isinstance(value, Tensor) else value


def with_class_of(original: Tensor, piece: Tensor) -> Tensor:
    """``piece``, a slice or copy of ``original`` of any shape, with the class and attributes of ``original``."""
    if not is_user_subclass(original) or type(piece) is type(original):
        return piece
    with DisableTorchFunctionSubclass():
        piece = piece.as_subclass(type(original))
    piece.__dict__.update(original.__dict__)
    return piece


def detached_leaf(leaf: Any) -> Any:
    """A leaf of a container, detached if it is a tensor."""
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def detached_copy(tensor: Tensor) -> Tensor:
    """A detached copy of the same class, attributes and shape; no method of the user's class is called."""
    return with_class_of(tensor, as_plain_tensor(tensor).detach().clone())


def storage_id(tensor: Tensor) -> int:
    """An identifier of a tensor's storage, equal for views of one another of whatever shapes, `.data` included."""
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else id(tensor)
