"""Snapshots of module state: attributes, containers, arrays, buffers and hooks, put back in place.

They are recorded before a step and restored after it; in between, callers read what the step changed (a list of
outputs, a lazily built mask). Torch's generators are handled by ``randomness``.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Collection, Iterable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, MethodWrapperType
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.utils.hooks import RemovableHandle

from lightning_hybrid.params import store
from lightning_hybrid.randomness.generators import generator_state, is_generator, set_generator_state
from lightning_hybrid.step.objects.modules import modules_in, parameters_of
from lightning_hybrid.step.objects.tensors import detached_copy, storage_id
from lightning_hybrid.step.standins.tensors import is_absent

# Attributes that Lightning sets on a module and that are not part of its state.
_NOT_STATE = frozenset(
    {"_trainer", "_fabric", "_device_mesh", "_log_hyperparams", "_hparams", "_current_fx_name", "forward", "log"}
)
_MEMBERS = frozenset({"_parameters", "_modules", "_buffers"})
_CONTAINERS = (list, dict, set, collections.deque)
_BUILT_IN = frozenset({*_CONTAINERS, collections.OrderedDict})  # types with a length
PLAIN = frozenset({float, int, bool, str, type(None)})
_LIBRARY = ("torch", "lightning", "pytorch_lightning", "builtins", "functools", "transformers.configuration", "logging")
_FUNCTIONS = FunctionType | BuiltinFunctionType | MethodType | MethodWrapperType
_MAX_DEPTH = 4
MAX_COPIED = 2**24  # elements of a tensor that is no buffer; such may be copied before every step


class AttributePath(NamedTuple):
    """The path of a value: an attribute of a module, then keys through containers."""

    module: str
    attribute: str
    path: tuple[Any, ...]

    def __str__(self) -> str:
        prefix = f"self.{self.module}." if self.module else "self."
        return prefix + self.attribute + "".join(f"[{key!r}]" for key in self.path)


class ArgumentSnapshot:
    """A snapshot of a unit's argument objects before it runs, such as the keys and values in a cache.

    Containers inside of them that have more than ``longest`` entries are left out.
    """

    def __init__(self, arguments: Iterable[Any], *, longest: float = math.inf) -> None:
        self._longest = longest
        self._contents: list[tuple[Any, Any]] = []
        self._of_modules: set[int] = set()
        self._empty: list[Any] = []  # every module has a dozen of torch's hook dicts
        self._generators: list[tuple[Any, Any]] = []
        self._arrays: list[tuple[numpy.ndarray[Any, Any], numpy.ndarray[Any, Any]]] = []
        seen: set[int] = set()
        for argument in arguments:
            inner = inside(argument)
            if inner is not None:
                self._record(inner, seen, 0)

    def _record(self, container: Any, seen: set[int], depth: int, *, top: bool = False) -> None:
        if id(container) in seen or depth > _MAX_DEPTH or len(container) > self._longest:
            return
        seen.add(id(container))
        self._contents.append((container, container.copy()))
        if top:
            self._of_modules.add(id(container))
        if not isinstance(container, dict):
            items = list(container)
        elif top:
            items = [item for name, item in container.items() if type(item) not in PLAIN and name not in _NOT_STATE]
        else:
            items = list(container.values())
        for item in items:
            kind: Any = type(item)
            if kind in _BUILT_IN and not item:
                if id(item) not in seen and depth < _MAX_DEPTH:
                    self._empty.append(item)
            elif _is_leaf(kind):
                self._record_leaf(item, seen)
            elif kind is numpy.ndarray:
                if item.flags.writeable and id(item) not in seen:
                    seen.add(id(item))
                    self._arrays.append((item, item.copy()))
            elif is_generator(item):
                self._generators.append((item, generator_state(item)))
            elif (inner := inside(item)) is not None:
                self._record(inner, seen, depth + 1)

    def _record_leaf(self, item: Any, seen: set[int]) -> None:
        """Record a leaf; its content stays what it is."""

    def lengths(self) -> dict[int, int]:
        """The recorded length of each container, by its id."""
        return {
            **{id(container): 0 for container in self._empty},
            **{id(container): len(content) for container, content in self._contents},
        }

    def restore(self) -> None:
        """Restore all contents in place, keeping the identity of containers."""
        for container in self._empty:
            if container:
                container.clear()
        for container, content in self._contents:
            if isinstance(container, dict):
                if id(container) in self._of_modules:  # attributes of Lightning may have been added or removed since
                    content = {name: value for name, value in content.items() if is_state(name)}
                    content |= {name: value for name, value in container.items() if not is_state(name)}
                if container.keys() == content.keys() and all(container[key] is content[key] for key in content):
                    continue
                container.clear()
                container.update(content)
            elif isinstance(container, set):
                container.intersection_update(content)
                container.update(content)
            else:
                container.clear()
                container.extend(content)
        for array, content in self._arrays:
            array[...] = content
        for generator, state in self._generators:
            set_generator_state(generator, state)


def can_restore(tensor: Tensor) -> bool:
    """Whether ``TensorSnapshot`` can record and restore a tensor, of whatever shape."""
    return tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_quantized or is_absent(tensor))


class TensorSnapshot:
    """A snapshot of a tensor, its content and memory: `tensor.data = other` does not change the version counter."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._memory, self._version = tensor, tensor.detach(), tensor._version
        self._content = detached_copy(tensor)

    @property
    def tensor(self) -> Tensor:
        """The tensor itself, of any shape."""
        return self._tensor

    def is_of(self, tensor: Tensor) -> bool:
        """Whether this is a snapshot of this tensor object, whatever shape that has now."""
        return self._tensor is tensor

    def is_here(self) -> bool:
        """Whether the tensor has not been written since."""
        return self._tensor._version == self._version and storage_id(self._tensor) == storage_id(self._memory)

    def restore(self) -> None:
        """Restore the content in the original memory."""
        # The kernel of batch norms writes the statistics without a change of the version counter.
        if self.is_here() and (not self._content.is_floating_point() or torch.equal(self._tensor, self._content)):
            return
        if storage_id(self._tensor) != storage_id(self._memory):
            store.move(self._tensor, self._memory)
        self._tensor.detach().copy_(self._content)
        self._version = self._tensor._version


class ModuleSnapshot(ArgumentSnapshot):
    """The state of all modules under a root at one moment, with the parameters that take gradients."""

    def __init__(
        self,
        root: nn.Module,
        *,
        buffers: bool = True,
        without: Collection[nn.Module] = (),
        unhooked: Collection[nn.Module] = (),
        copied: float = MAX_COPIED,
    ) -> None:
        """Record the state of modules but those ``without``, from which ``restore`` removes new hooks if ``unhooked``.

        Without ``buffers``, those are no part of the state to restore. Other tensors are, up to ``copied`` elements.
        """
        super().__init__(())
        self._unhooked, self._first_hook, self._copied = unhooked, RemovableHandle.next_id, copied
        self._buffers: list[TensorSnapshot] = []
        self._tensors: list[TensorSnapshot] = []
        # A step that ends in the middle leaves what it has toggled.
        modules = modules_in(root)
        parameters = [parameter for _, parameter in parameters_of(modules)]
        self._trained = [(p, p.requires_grad) for p in parameters if not is_absent(p)]
        seen = set(map(id, parameters))
        passed = {id(module) for module in without}  # metrics change their hash with their state
        for _, module in modules:
            if id(module) in passed:
                continue
            if not buffers:
                seen.add(id(module._buffers))
            for buffer in module._buffers.values():
                if buffers and buffer is not None and id(buffer) not in seen and not is_absent(buffer):
                    seen.add(id(buffer))
                    self._buffers.append(TensorSnapshot(buffer))
            self._record(module.__dict__, seen, 0, top=True)

    def _record_leaf(self, item: Any, seen: set[int]) -> None:
        if isinstance(item, Tensor) and id(item) not in seen and can_restore(item) and item.numel() <= self._copied:
            seen.add(id(item))
            self._tensors.append(TensorSnapshot(item))

    def written_buffers(self, root: nn.Module) -> frozenset[str]:
        """FQNs of the buffers of a module that have been written since, or are others.

        Averages of BatchNorm are left out; kernels write averages of other norms without telling.
        """
        here = {id(content.tensor) for content in self._buffers if content.is_here()}
        return frozenset(
            f"{fqn}.{name}" if fqn else name
            for fqn, module in modules_in(root)
            if not isinstance(module, _BatchNorm)
            for name, buffer in module._buffers.items()
            if buffer is not None and not is_absent(buffer)
            if id(buffer) not in here or (isinstance(module, _NormBase) and module.training)
        )

    def has_unchanged(self, buffer: Tensor) -> bool:
        """Whether a buffer of any shape is recorded and has not been written since."""
        return any(content.is_of(buffer) and content.is_here() for content in self._buffers)

    def restore(self) -> None:
        """Restore the state in place, keeping the identity of containers and tensors."""
        super().restore()
        for content in (*self._buffers, *self._tensors):
            content.restore()
        for parameter, takes_gradients in self._trained:
            if parameter.requires_grad != takes_gradients:
                parameter.requires_grad_(takes_gradients)
        if RemovableHandle.next_id != self._first_hook:
            for module in self._unhooked:
                _remove_hooks(module, self._first_hook)


def _remove_hooks(module: nn.Module, first: int) -> None:
    """Remove the hooks with this or a later number; torch counts the hooks of all modules."""
    for name, hooks in module.__dict__.items():
        if hooks and "_hooks" in name and isinstance(hooks, dict):
            for number in [number for number in hooks if isinstance(number, int) and number >= first]:
                del hooks[number]


def reachable_leaves(
    root: nn.Module, without: Collection[nn.Module] = (), *, plain: bool = True
) -> Iterator[tuple[AttributePath, Any]]:
    """Iterates over every leaf (tensor, number, object) in attributes and containers of modules, with its path.

    ``plain`` tells whether to include numbers, strings and None, which most leaves are.
    """
    seen: set[int] = set()
    passed = frozenset() if plain else PLAIN
    left_out = {id(module) for module in without}

    def walk(place: AttributePath, value: Any, depth: int) -> Iterator[tuple[AttributePath, Any]]:
        inner = value if isinstance(value, tuple) else inside(value)
        if inner is None or depth > _MAX_DEPTH:
            yield place, value
            return
        if id(inner) in seen:
            return
        seen.add(id(inner))
        if isinstance(inner, set) and PLAIN.issuperset(map(type, inner)):
            inner = sorted(inner, key=str)  # equal sets may have other orders
        for key, item in list(inner.items() if isinstance(inner, dict) else enumerate(inner)):
            if type(item) not in passed:
                yield from walk(place._replace(path=(*place.path, key)), item, depth + 1)

    for name, module in modules_in(root):
        if id(module) in left_out:
            continue
        for attribute, value in list(module.__dict__.items()):
            # Every module has a dozen empty containers of torch's: hooks of each kind.
            kind = type(value)
            if kind in passed or (kind in _BUILT_IN and not value) or (isinstance(value, _CONTAINERS) and not value):
                continue
            if attribute not in _NOT_STATE and attribute not in _MEMBERS:
                yield from walk(AttributePath(name, attribute, ()), value, 0)


def is_state(name: str) -> bool:
    """Whether an attribute of this name is part of a module's state, and not set by Lightning."""
    return name not in _NOT_STATE


@functools.lru_cache(4096)
def _is_leaf(kind: Any) -> bool:
    """Whether no object of a type has contents of the user, nor a state of random numbers."""
    return kind in PLAIN or issubclass(kind, Tensor | nn.Module | type | _FUNCTIONS)


def inside(value: Any) -> Any:
    """The container with the contents of ``value``: itself, or attributes of a plain user object; None for a leaf."""
    if isinstance(value, _CONTAINERS):
        return value
    kind: Any = type(value)
    if _is_leaf(kind) or isinstance(value, Tensor | nn.Module | type | _FUNCTIONS):
        return None
    if kind.__module__.split(".")[0] in _LIBRARY or kind.__module__.startswith(_LIBRARY):
        return None
    return getattr(value, "__dict__", None)
