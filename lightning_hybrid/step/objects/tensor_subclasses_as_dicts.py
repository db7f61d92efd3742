"""Tensor subclasses that hold several plain tensors (quantized values and their scales), as dicts of these.

A quantized optimizer state of torchao is one tensor outside, and codes, scales and a table inside. A checkpoint of
plain tensors stores a dict in its place, from which the same object is rebuilt.
"""

from __future__ import annotations

import importlib
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_hybrid.errors import CheckpointError
from lightning_hybrid.step.objects.pytree import map_leaves

_CLASS, _TENSORS, _ATTRIBUTES = "class of the tensor", "tensors", "attributes"
# Packages whose modules may be imported because a checkpoint names them; their classes are registered with torch then.
_PACKAGES = ("torchao.",)
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.Size)


def holds_tensors(value: Any) -> bool:
    """Whether a value is a tensor whose memory is that of other tensors inside of it."""
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
    """The inverse of `subclasses_as_dicts`.

    Args:
        tree: Of dicts, lists and tuples.
        trusts: Whether any class may be built; otherwise those that `torch.load(weights_only=True)` builds.

    Raises:
        CheckpointError: A class is unknown, or not to be trusted.
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
