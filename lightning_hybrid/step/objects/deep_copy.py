"""Deep copies of arguments, so that a second call finds caches in them unchanged."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.step.objects.tensor_storage_and_subclasses import detached_copy

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


def copied(value: Any, new: Callable[[Tensor], Tensor] = detached_copy, *, modules: bool = True) -> Any:
    """A deep copy of any object, with new tensors for its tensors, non-leaf tensors included.

    A cache that a unit fills must be copied before each call of the unit.

    Args:
        value: The object; it is shared if it cannot be copied.
        new: Creates the tensors of the copy; by default with their shapes and contents.
        modules: Whether modules in it are copied too; otherwise the copy shares them.
    """
    memo: dict[int, Any] = {}
    for found in _tensors_and_modules_in(value, {}):
        if isinstance(found, Tensor):
            memo[id(found)] = new(found)
        elif not modules:
            memo[id(found)] = found
    try:
        return copy.deepcopy(value, memo)
    except Exception:
        return value  # an object that cannot be copied is shared


def may_change(value: Any) -> bool:
    """Whether a call could change this argument other than by writing to a tensor."""
    if isinstance(value, tuple):
        return any(map(may_change, value))
    return not isinstance(value, (Tensor, nn.Module, *_PLAIN))


def _tensors_and_modules_in(value: Any, seen: dict[int, Any]) -> Iterator[Tensor | nn.Module]:
    if id(value) in seen or isinstance(value, (*_PLAIN, type)):
        return
    seen[id(value)] = value
    if isinstance(value, Tensor | nn.Module):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_and_modules_in(item, seen)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from _tensors_and_modules_in(item, seen)
    elif hasattr(value, "__dict__"):
        for item in vars(value).values():
            yield from _tensors_and_modules_in(item, seen)
