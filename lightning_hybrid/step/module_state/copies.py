"""Copies of modules and of arguments whose tensors have no storage: plans and counts need shapes only."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer
from torch.overrides import TorchFunctionMode

from lightning_hybrid.step.objects.tensors import holds_tensors
from lightning_hybrid.step.standins.tensors import full_shape, user_attributes

_T = TypeVar("_T")
_TRAINERS = ("_trainer", "_fabric")  # attributes of a LightningModule


def on_meta(tensor: Tensor) -> Tensor:
    """A meta tensor of the shape, strides and dtype of a tensor with or without values."""
    with torch._C._DisableTorchDispatch():
        shape, strides = full_shape(tensor), tensor.stride()
        dense = tensor.shape == torch.Size(shape)
        meta = (
            torch.empty_strided(shape, strides, dtype=tensor.dtype, device="meta")
            if dense
            else torch.empty(shape, dtype=tensor.dtype, device="meta")
        )
    return meta.requires_grad_(tensor.requires_grad)


def copy_on_meta(value: _T, *, only_parameters: bool = False, memo: dict[int, Any] | None = None) -> _T:
    """A deep copy in which tensors are on the meta device; no bytes of them are copied.

    Tied parameters stay tied. Each parameter keeps its class, ``requires_grad`` and the attributes that the user set;
    lazy ones stay lazy. A LightningModule's copy has no Trainer. With ``only_parameters``, other tensors (buffers, data
    sets) are copied with their values, as code that reads values needs them, unless they result from an operation.
    ``memo`` is as for ``copy.deepcopy``.
    """
    parts = value if isinstance(value, tuple) else (value,)
    modules = [module for part in parts if isinstance(part, nn.Module) for module in part.modules()]
    trainers = {id(vars(module).get(name)): None for module in modules for name in _TRAINERS}
    known: dict[int, Any] = {**trainers, **(memo or {})}
    known.pop(id(None), None)
    with _DeepCopiesOnMeta(only_parameters=only_parameters):
        result = copy.deepcopy(value, known)
    for module in modules:
        for parameter in module.parameters(recurse=False):
            own = known[id(parameter)].__dict__
            own.update({name: value for name, value in user_attributes(parameter).items() if name not in own})
    return result


class _DeepCopiesOnMeta(TorchFunctionMode):
    """A function mode in which deep copies of tensors are on the meta device."""

    def __init__(self, *, only_parameters: bool) -> None:
        super().__init__()
        self._only_parameters = only_parameters

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        # Parameter.__deepcopy__ names a format; a method of the user's may copy values too.
        if name == "clone" and ("memory_format" in kwargs or not self._only_parameters):
            return _empty(args[0])
        if name != "__deepcopy__":
            return func(*args, **kwargs)
        if id(args[0]) not in args[1]:
            args[1][id(args[0])] = self._copied(func, *args)
        return args[1][id(args[0])]

    def _copied(self, deepcopy: Any, tensor: Any, memo: dict[int, Any]) -> Any:
        kind: Any = type(tensor)
        if issubclass(kind, UninitializedBuffer):  # of a batch norm; torch refuses to copy it
            return kind(device=tensor.device, dtype=tensor.dtype, persistent=tensor.persistent)
        is_parameter = isinstance(tensor, nn.Parameter)
        if self._only_parameters and tensor.is_leaf and not is_parameter:
            return deepcopy(tensor, memo)
        empty = _empty(tensor)
        found = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
        return found.requires_grad_(tensor.requires_grad)


def _empty(tensor: Any) -> Any:
    """A meta tensor of the class and shape of a tensor, without a gradient."""
    if not holds_tensors(tensor):
        return on_meta(tensor).detach()
    names, context = tensor.__tensor_flatten__()
    inner = {name: _empty(getattr(tensor, name)) for name in names}
    return type(tensor).__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())
