"""Tensors as objects: the identity of their storage, their subclasses, and hooks on their gradients.

A user's subclass may be plain memory with further attributes. Tensor subclasses that hold several plain tensors
(quantized values and their scales), as dicts of these.

A quantized optimizer state of torchao is one tensor outside, and codes, scales and a table inside. A checkpoint of
plain tensors stores a dict in its place, from which the same object is rebuilt.

Gradient hooks with a flag that tells whether a call would do nothing; observers of averages.
"""

from __future__ import annotations

import importlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass
from torch.utils.hooks import RemovableHandle

from lightning_hybrid.errors import CheckpointError
from lightning_hybrid.step.objects.pytree import map_leaves


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


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype in which the gradients of a parameter of any shape are added."""
    return parameter.grad_dtype or parameter.dtype


def detached_leaf(leaf: Any) -> Any:
    """A leaf of a container, detached if it is a tensor."""
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def detached_copy(tensor: Tensor) -> Tensor:
    """A detached copy of the same class, attributes and shape; no method of the user's class is called."""
    return with_class_of(tensor, as_plain_tensor(tensor).detach().clone())


def storage_id(tensor: Tensor) -> int:
    """An identifier of a tensor's storage, equal for views of one another of whatever shapes, `.data` included."""
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else id(tensor)


_CLASS, _TENSORS, _ATTRIBUTES = "class of the tensor", "tensors", "attributes"
# Packages whose modules may be imported because a checkpoint names them; their classes are registered with torch then.
_PACKAGES = ("torchao.",)
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.Size)


def holds_tensors(value: Any) -> bool:
    """Whether a value is a tensor that has its memory from tensors inside of it."""
    return isinstance(value, Tensor) and bool(is_traceable_wrapper_subclass(value))


def inner_tensors(value: Any) -> list[Tensor]:
    """The plain tensors that have the memory of a tensor: itself, or those inside of it, of other shapes and dtypes."""
    if not holds_tensors(value):
        return [value]
    return [inner for name in value.__tensor_flatten__()[0] for inner in inner_tensors(getattr(value, name))]


def subclasses_as_dicts(tree: Any) -> Any:
    """A tree with a dict in place of each tensor that holds others, if what else it holds are plain values."""
    return map_leaves(_as_dict, tree)


def dicts_as_subclasses(tree: Any, *, trusts: bool = False) -> Any:
    """The inverse of `subclasses_as_dicts`, in dicts, lists and tuples.

    Without ``trusts`` only classes that `torch.load(weights_only=True)` builds are built, or else a ``CheckpointError``
    is raised.
    """
    if type(tree) in (dict, OrderedDict):
        built = type(tree)((key, dicts_as_subclasses(value, trusts=trusts)) for key, value in tree.items())
        return _rebuilt(built, trusts) if _CLASS in built else built
    if type(tree) in (list, tuple):
        return type(tree)(dicts_as_subclasses(value, trusts=trusts) for value in tree)
    return tree


def _as_dict(value: Any) -> Any:
    if not holds_tensors(value):
        return value
    names, attributes = value.__tensor_flatten__()
    if not isinstance(attributes, list | tuple) or not all(isinstance(each, _PLAIN) for each in attributes):
        return value
    return {
        _CLASS: f"{type(value).__module__}.{type(value).__qualname__}",
        _TENSORS: {name: _as_dict(getattr(value, name)) for name in names},
        _ATTRIBUTES: [tuple(each) if isinstance(each, torch.Size) else each for each in attributes],
    }


def _rebuilt(entry: dict[str, Any], trusts: bool) -> Tensor:
    return _class_of(entry[_CLASS], trusts).__tensor_unflatten__(entry[_TENSORS], entry[_ATTRIBUTES], None, None)


def _class_of(name: str, trusts: bool) -> Any:
    """The class of a tensor; only one that torch builds from a file of tensors, unless the checkpoint is trusted."""
    module, _, qualified = name.rpartition(".")
    try:
        if trusts or name.startswith(_PACKAGES):
            importlib.import_module(module)
    except ImportError as error:
        raise CheckpointError(
            f"the checkpoint has optimizer states of the class {name}, which cannot be imported ({error}); install"
            f" {name.split('.')[0]}",
            entry="tensor-class",
        ) from error
    for known in torch.serialization.get_safe_globals():
        if isinstance(known, type) and f"{known.__module__}.{known.__qualname__}" == name:
            return known
    if trusts and (found := getattr(importlib.import_module(module), qualified, None)) is not None:
        return found
    raise CheckpointError(
        f"the checkpoint has optimizer states of the class {name}, which torch does not build from untrusted files; if"
        " you trust it, pass weights_only=False (--trust on the command line), or register the class by"
        " torch.serialization.add_safe_globals",
        entry="tensor-class",
    )


class GradientObserver(Protocol):
    """Sees gradients before and after they are averaged over replicas, once for each message on either side."""

    def before_average(self, parameter: Tensor, gradient: Tensor) -> None:
        """Called with this rank's full gradient, in the parameter's full shape; with ZeRO, of its latest batch."""

    def after_average(self, parameter: Tensor, average: Tensor) -> None:
        """Called with the average over replicas that this rank keeps, in the full or the shard's shape."""


class GradientHook:
    """A hook for ``register_post_accumulate_grad_hook`` that most backwards of a step may skip."""

    def __init__(self, call: Callable[[Tensor], None], is_idle: Callable[[], bool]) -> None:
        """Take ``call`` (called with the parameter), ``is_idle`` (tells whether a call would do nothing now)."""
        self._call, self._is_idle = call, is_idle

    def __call__(self, parameter: Tensor) -> None:
        """Handle a new gradient of the parameter, of the shape that this rank has."""
        with torch._C.DisableTorchFunctionSubclass():
            self._call(parameter)

    def register(self, parameter: Tensor) -> RemovableHandle:
        """Register on a parameter of any shape: the hook gets the shard's gradient, hooks of users a full one."""
        with torch._C.DisableTorchFunction():
            return parameter.register_post_accumulate_grad_hook(self)

    @property
    def is_idle(self) -> bool:
        """Whether a call would do nothing now, so that the gradient may be accumulated later."""
        return self._is_idle()


def gradient_hooks(parameter: Tensor) -> tuple[dict[int, Any], dict[int, Any]]:
    """The hooks on the gradient of a parameter of any shape, and after its accumulation, in the order of torch."""
    with torch._C.DisableTorchFunction():
        return parameter._backward_hooks or {}, getattr(parameter, "_post_accumulate_grad_hooks", None) or {}


def hooks_of_user(parameter: Tensor) -> list[Any]:
    """The user's hooks on the gradient of a parameter of any shape, outside of a step."""
    both = gradient_hooks(parameter)
    return [hook for hooks in both for hook in hooks.values() if not isinstance(hook, GradientHook)]
