"""Pytrees: flatten and rebuild the containers that user code passes around.

Steps receive and return tensors inside tuples, named tuples, dicts, dataclasses, ``torch.distributions``, Hugging Face
``BatchEncoding`` and ``ModelOutput`` objects. ``flatten`` yields the leaves in a fixed order and a ``Spec`` from which
the same container is rebuilt around other leaves. It is written for the hot path: a bare tensor or a flat tuple costs
next to nothing, and a container of an unknown type is a leaf.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributions import Distribution

LEAF = None
_LEAF_TYPES = frozenset(
    {Tensor, nn.Parameter, FakeTensor, int, float, bool, str, type(None), torch.dtype, torch.device}
)


class Spec(NamedTuple):
    """Rebuilds one container: ``build(children)``, and the specs of its children (``None`` is a leaf)."""

    build: Callable[[list[Any]], Any]
    children: tuple[Spec | None, ...]


def flatten(value: Any, leaves: list[Any] | None = None) -> tuple[list[Any], Spec | None]:
    """Leaves of ``value`` in a fixed order, appended to ``leaves`` if given, and the spec that rebuilds it."""
    if leaves is None:
        leaves = []
    if type(value) in _LEAF_TYPES:
        leaves.append(value)
        return leaves, LEAF
    opened = children_of(value)
    if opened is None:
        leaves.append(value)
        return leaves, LEAF
    children, build = opened
    return leaves, Spec(build, tuple([flatten(child, leaves)[1] for child in children]))


def flatten_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], bool]:
    """The leaves of ``flatten((args, kwargs))``, and whether each argument is one leaf; fast in that case."""
    leaves: list[Any] = []
    plain = True
    for value in (*args, *kwargs.values()):
        if type(value) in _LEAF_TYPES:
            leaves.append(value)
        else:
            plain = flatten(value, leaves)[1] is LEAF and plain
    return leaves, plain


def rebuild_call(
    leaves: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any], plain: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with other leaves; ``plain`` is the flag that ``flatten_call`` returned."""
    if plain:
        return tuple(leaves[: len(args)]), dict(zip(kwargs, leaves[len(args) :], strict=True))
    rebuilt: tuple[tuple[Any, ...], dict[str, Any]] = unflatten(leaves, flatten((args, kwargs))[1])
    return rebuilt


def unflatten(leaves: list[Any], spec: Spec | None) -> Any:
    """The inverse of ``flatten``."""
    value, used = _build(leaves, 0, spec)
    assert used == len(leaves)
    return value


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with ``function`` applied to each leaf."""
    leaves, spec = flatten(value)
    return unflatten([function(leaf) for leaf in leaves], spec)


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """``value`` with ``function`` applied to each tensor, of any shape, among its leaves."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, value)


def _build(leaves: list[Any], start: int, spec: Spec | None) -> tuple[Any, int]:
    if spec is LEAF:
        return leaves[start], start + 1
    children = []
    for child in spec.children:
        built, start = _build(leaves, start, child)
        children.append(built)
    return spec.build(children), start


def children_of(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """The children of a container, and a function that rebuilds it from other children; None for a leaf."""
    kind = type(value)
    if kind is tuple:
        return list(value), tuple
    if kind is list:
        return value, list
    if kind is dict:
        keys = list(value)
        return list(value.values()), lambda children: dict(zip(keys, children, strict=True))
    if isinstance(value, tuple):
        # A named tuple is built from its fields; torch's own return types (torch.max) take one sequence.
        return list(value), (lambda children: kind(*children)) if hasattr(kind, "_fields") else kind
    if isinstance(value, list):
        return list(value), kind
    if isinstance(value, slice):
        return [value.start, value.stop, value.step], lambda children: slice(*children)
    if isinstance(value, Mapping):
        return _mapping(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _with_members(value, [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)])
    if isinstance(value, Distribution) or kind in _OPENED:
        return _with_members(value, list(vars(value)))
    return None


_OPENED: set[type] = set()  # user classes whose objects carry values from layer to layer


class ContainerClassRegistered(BaseException):
    """Raised when objects of another class become containers; not an ``Exception``, which user code might catch."""


def register_container_class(leaf: Any) -> None:
    """Register the class of an object that a layer returns as a container if it has values of the model inside.

    One with nested objects, such as a cache that layers write into, stays a leaf. ``ContainerClassRegistered`` is
    raised where the class has been registered.
    """
    kind = type(leaf)
    if kind in _LEAF_TYPES or kind in _OPENED or isinstance(leaf, Tensor | nn.Module) or not hasattr(leaf, "__dict__"):
        return
    inside = flatten(list(vars(leaf).values()))[0]
    if any(isinstance(one, FakeTensor) for one in inside) and all(
        isinstance(one, Tensor) or not tensors_inside(one) for one in inside
    ):
        _OPENED.add(kind)
        raise ContainerClassRegistered


def _mapping(value: Mapping[Any, Any]) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    keys = list(value.keys())  # iterating over a TensorDict gives its samples

    def build(children: list[Any]) -> Any:
        if hasattr(value, "auto_batch_size_"):  # a TensorDict requires one number of samples of all members
            kind: Any = type(value)
            return kind(dict(zip(keys, children, strict=True)), batch_size=[]).auto_batch_size_(value.batch_dims)  # type: ignore[attr-defined]
        return mapping_like(value, dict(zip(keys, children, strict=True)))

    return [value[key] for key in keys], build


def mapping_like(value: Mapping[Any, Any], entries: dict[Any, Any]) -> Any:
    """A mapping with these entries, of the class (a ModelOutput) and with the other attributes of ``value``."""
    result = copy.copy(value)
    if not isinstance(result, MutableMapping):
        return entries
    if isinstance(result, UserDict):
        vars(result)["data"] = dict(result.data)  # copies share their dict
    for key, entry in entries.items():
        result[key] = entry
    return result


def _with_members(value: Any, names: list[str]) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    def build(children: list[Any]) -> Any:
        result = copy.copy(value)
        for name, child in zip(names, children, strict=True):
            object.__setattr__(result, name, child)
        return result

    return [getattr(value, name) for name in names], build


_MOST_OBJECTS = 1000


def tensors_inside(value: object, seen: set[int] | None = None) -> list[Tensor]:
    """The tensors, of any shapes, in an object of an unknown class, such as a batch of graphs, or in containers."""
    seen = set() if seen is None else seen
    if isinstance(value, Tensor):
        return [value]
    if type(value) in _LEAF_TYPES or id(value) in seen or isinstance(value, nn.Module | type) or callable(value):
        return []
    if len(seen) == _MOST_OBJECTS:
        return []
    seen.add(id(value))
    opened = children_of(value)
    inner: list[Any] = opened[0] if opened is not None else list(getattr(value, "__dict__", {}).values())
    return [tensor for item in inner for tensor in tensors_inside(item, seen)]
