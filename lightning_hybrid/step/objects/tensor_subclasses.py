"""Tensor subclasses of the user, such as torchvision's images: plain memory with more than its numbers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass
from torch.utils._python_dispatch import _disable_current_modes


def is_of_user_class(value: Any) -> bool:
    """Whether ``value`` is a tensor with a class and attributes of its own, whose kernels are those of any tensor."""
    kind = type(value)
    return (
        isinstance(value, Tensor)
        and kind is not Tensor
        and not isinstance(value, nn.Parameter)
        and kind.__torch_dispatch__ is Tensor.__torch_dispatch__
    )


def as_plain(value: Any) -> Any:
    """The same memory without the class, for kernels that know plain tensors only; other values as they are."""
    if not is_of_user_class(value):
        return value
    with _disable_current_modes(), DisableTorchFunctionSubclass():
        return value.as_subclass(Tensor)


def of_class(original: Tensor, part: Tensor) -> Tensor:
    """``part``, cut out of ``original``, with the class and the attributes of that."""
    if not is_of_user_class(original) or type(part) is type(original):
        return part
    with DisableTorchFunctionSubclass():
        part = part.as_subclass(type(original))
    part.__dict__.update(original.__dict__)
    return part


def detached_copy(tensor: Tensor) -> Tensor:
    """A copy without the graph, of the same class and attributes; no method of the user's class is called."""
    return of_class(tensor, as_plain(tensor).detach().clone())
