"""Pytrees: take apart and rebuild the containers that user code passes around.

Steps receive and return tensors inside tuples, named tuples, dicts, dataclasses, ``torch.distributions``, Hugging Face
``BatchEncoding`` and ``ModelOutput`` objects. ``flatten`` yields the leaves in a fixed order and a ``Spec`` from which
the same container is rebuilt around other leaves. It is written for the hot path: a bare tensor or a flat tuple costs
next to nothing, and a container type that is not known here is a leaf.
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


class Spec(NamedTuple):
    """How one container is rebuilt: ``build(children)``, and the specs of its children (``None`` is a leaf)."""

    build: Callable[[list[Any]], Any]
    children: tuple[Spec | None, ...]


def flatten(value: Any, leaves: list[Any] | None = None) -> tuple[list[Any], Spec | None]:
    """Leaves of ``value`` in a fixed order, and the spec that rebuilds it.

    Args:
        value: Any object; unknown types are leaves.
        leaves: A list to append to; a new one by default.
    """
    if leaves is None:
        leaves = []
    parts = children_of(value)
    if parts is None:
        leaves.append(value)
        return leaves, LEAF
    children, build = parts
    return leaves, Spec(build, tuple([flatten(child, leaves)[1] for child in children]))


_LEAF_TYPES = frozenset(
    {Tensor, nn.Parameter, FakeTensor, int, float, bool, str, type(None), torch.dtype, torch.device}
)


def flatten_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], bool]:
    """The leaves of ``flatten((args, kwargs))``, and whether each argument is one leaf; quick where that is so."""
    leaves = [*args, *kwargs.values()]
    for leaf in leaves:
        if type(leaf) not in _LEAF_TYPES:
            return flatten((args, kwargs))[0], False
    return leaves, True


def rebuild_call(
    leaves: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any], plain: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call around other leaves; ``plain`` is what ``flatten_call`` said."""
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


def _build(leaves: list[Any], start: int, spec: Spec | None) -> tuple[Any, int]:
    if spec is LEAF:
        return leaves[start], start + 1
    children = []
    for child in spec.children:
        built, start = _build(leaves, start, child)
        children.append(built)
    return spec.build(children), start


def children_of(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """What a container holds, and how it is rebuilt around other children; None for a leaf."""
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


_OPENED: set[type] = set()  # classes of the user's that hand values on from layer to layer


class ClassOpened(BaseException):
    """Objects of a further class are containers from now on; no exception that user code might catch."""


def open_class(leaf: Any) -> None:
    """See that values of the model do not hide in an object that a layer returns.

    Args:
        leaf: The object. One with further objects inside, such as a cache that layers write into, is left alone.

    Raises:
        ClassOpened: They did.
    """
    kind = type(leaf)
    if kind in _LEAF_TYPES or kind in _OPENED or isinstance(leaf, Tensor | nn.Module) or not hasattr(leaf, "__dict__"):
        return
    inside = flatten(list(vars(leaf).values()))[0]
    if any(isinstance(one, FakeTensor) for one in inside) and all(
        isinstance(one, Tensor) or not tensors_inside(one) for one in inside
    ):
        _OPENED.add(kind)
        raise ClassOpened


def _mapping(value: Mapping[Any, Any]) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    keys = list(value.keys())  # what a TensorDict iterates over is its samples

    def build(children: list[Any]) -> Any:
        if hasattr(value, "auto_batch_size_"):  # a TensorDict holds its members to one number of samples
            kind: Any = type(value)
            return kind(dict(zip(keys, children, strict=True)), batch_size=[]).auto_batch_size_(value.batch_dims)  # type: ignore[attr-defined]
        # A shallow copy keeps what else the object carries (an encoding's tokenizer data, a ModelOutput's class).
        result = copy.copy(value)
        if not isinstance(result, MutableMapping):
            return dict(zip(keys, children, strict=True))
        if isinstance(result, UserDict):
            result.data = dict(result.data)  # copies share their dict
        for key, child in zip(keys, children, strict=True):
            result[key] = child
        return result

    return [value[key] for key in keys], build


def _with_members(value: Any, names: list[str]) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    def build(children: list[Any]) -> Any:
        result = copy.copy(value)
        for name, child in zip(names, children, strict=True):
            object.__setattr__(result, name, child)
        return result

    return [getattr(value, name) for name in names], build


_MOST_OBJECTS = 1000


def tensors_inside(value: object, seen: set[int] | None = None) -> list[Tensor]:
    """The tensors that an object of a class unknown here, such as a batch of graphs, holds in its attributes."""
    seen = set() if seen is None else seen
    if isinstance(value, Tensor):
        return [value]
    if type(value) in _LEAF_TYPES or id(value) in seen or isinstance(value, nn.Module | type) or callable(value):
        return []
    if len(seen) == _MOST_OBJECTS:
        return []
    seen.add(id(value))
    parts = children_of(value)
    inner: list[Any] = parts[0] if parts is not None else list(getattr(value, "__dict__", {}).values())
    return [tensor for part in inner for tensor in tensors_inside(part, seen)]


def memory_of(tensor: Tensor) -> int:
    """The same for tensors that are views of one another, `.data` included."""
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else id(tensor)
