"""A recording of initialisation operations on meta tensors, repeated later on real memory.

While ``watching()``, tensors on the meta device pass for real ones. An operation that makes or writes one is noted with
what it read and, if it draws, with the generator's state; it draws once on memory freed at once, so that the generator
goes on as it would have. ``value`` repeats those operations on which one tensor depends.

    noted    uniform_(a)     normal_(a)      b = a @ a
    value    -               normal_(a)      b = a @ a      of b: the first draw was overwritten
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

_META = torch.device("meta")
_aten = torch.ops.aten
_GET_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
# Files of torch that leave tensors on meta alone or warn of them; what they do is noted like anything else.
_SKIPS_META = frozenset({"torch.nn.init", "torch.nn.modules.module"})
# Their results are uninitialised memory.
_EMPTY = frozenset(
    {"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided"}
)
# They write all of their first argument and read nothing of it.
_OVERWRITES = frozenset(
    f"aten::{name}_"
    for name in (
        "bernoulli",
        "cauchy",
        "copy",
        "exponential",
        "fill",
        "geometric",
        "log_normal",
        "normal",
        "random",
        "uniform",
        "zero",
    )
)


class InitialValueError(RuntimeError):
    """A parameter or buffer on the meta device has no initial value."""


@dataclass(frozen=True)
class Part:
    """A tensor, as a part of a noted storage."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass
class _Source:
    """A real tensor that a noted operation reads; a copy of it once it is about to change."""

    tensor: Tensor
    version: int


@dataclass(frozen=True)
class _Operation:
    """One noted operation; tensors on meta are parts, real ones sources."""

    func: Any
    leaves: list[Any]
    spec: Any
    outputs: tuple[Part | None, ...]
    touched: frozenset[int]
    overwrites: int | None
    state: Tensor | None


class NotedOperations:
    """What was done to tensors without storage, and the values that come of it."""

    def __init__(self, device: torch.device) -> None:
        """Args: device: where values are drawn and made."""
        self._device = device
        self._numbers: dict[int, int] = {}
        self._storages: list[torch.UntypedStorage] = []  # held: they keep the keys of `_numbers` apart
        self._operations: list[_Operation] = []
        self._writers: dict[int, list[int]] = {}
        self._sources: dict[int, list[_Source]] = {}
        self._fresh: dict[int, StorageWeakRef] = {}

    # -- noting -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Operations inside are noted."""
        try:
            with _AsIfReal(), _Watch(self):
                yield
        finally:
            self._fresh.clear()

    def knows(self, tensor: Tensor) -> bool:
        """Whether a tensor on meta is part of a noted storage."""
        return tensor.untyped_storage()._cdata in self._numbers

    def is_fresh(self, tensor: Tensor) -> bool:
        """Whether a real tensor is memory that was made inside and that nothing was written to."""
        return tensor.untyped_storage()._cdata in self._fresh

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation while building: for real where nothing on meta is involved, otherwise note it."""
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        written = _written(func, args, kwargs)
        self._keep_sources(written)
        if not any(is_on_meta(tensor) for tensor in tensors) and not _is_meta(kwargs.get("device")):
            out = func(*args, **kwargs)
            self._note_fresh(func, out, written)
            return out
        makes_tensors = any("Tensor" in str(returned.type) for returned in func._schema.returns)
        if any(not is_on_meta(tensor) for tensor in written) or not (makes_tensors or written):
            return self._run_real(func, leaves, spec)  # a real tensor is written, or a number read
        state = self._draw(func, leaves, spec, kwargs)
        if func is _aten._to_copy.default and kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": _META}  # where a parameter lives is settled when it gets its value
        try:
            out = func(*args, **kwargs)
        except NotImplementedError:  # the shape of the result depends on values
            if state is not None:
                self._generator(kwargs).set_state(state)
            return self._run_real(func, leaves, spec)
        self._note(func, leaves, spec, written, out, state)
        return out

    def _note_fresh(self, func: Any, out: Any, written: list[Tensor]) -> None:
        """Tell uninitialised memory from memory with values."""
        if func._schema.name in _EMPTY:
            if out.layout == torch.strided:
                self._fresh[out.untyped_storage()._cdata] = StorageWeakRef(out.untyped_storage())
            return
        for tensor in written:
            if tensor.layout == torch.strided:
                self._fresh.pop(tensor.untyped_storage()._cdata, None)

    def _note(self, func: Any, leaves: list[Any], spec: Any, written: list[Tensor], out: Any, state: Any) -> None:
        parts = [self.part(leaf) if is_on_meta(leaf) else leaf for leaf in leaves]
        touched = {part.storage for part in parts if isinstance(part, Part)}
        outputs = [self.part(leaf) if is_on_meta(leaf) else None for leaf in tree_leaves(out)]
        made = tuple(None if part is None or part.storage in touched else part for part in outputs)
        targets = {self.part(tensor).storage for tensor in written} | {part.storage for part in made if part}
        if not targets or func._schema.name in _EMPTY:
            return  # a view, or memory that nothing was written to
        overwrites = None
        if func._schema.name in _OVERWRITES and self._covers(first := self.part(written[0])):
            overwrites = first.storage
        known = [self._source(leaf) if isinstance(leaf, Tensor) else leaf for leaf in parts]
        operation = _Operation(func, known, spec, made, frozenset(touched | targets), overwrites, state)
        for target in targets:
            self._writers.setdefault(target, []).append(len(self._operations))
        self._operations.append(operation)

    def _source(self, tensor: Tensor) -> _Source:
        source = _Source(tensor, tensor._version)
        if tensor.layout == torch.strided:
            self._sources.setdefault(tensor.untyped_storage()._cdata, []).append(source)
        return source

    def _keep_sources(self, written: list[Tensor]) -> None:
        """What was read of a real tensor stays as it was."""
        for tensor in written:
            if tensor.layout == torch.strided:
                for source in self._sources.pop(tensor.untyped_storage()._cdata, []):
                    source.tensor = source.tensor.clone()
                    source.version = source.tensor._version

    def _draw(self, func: Any, leaves: list[Any], spec: Any, kwargs: dict[str, Any]) -> Tensor | None:
        """The generator's state before an operation that draws; afterwards the generator has drawn."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return None
        state = self._generator(kwargs).get_state()
        if func._schema.name in _OVERWRITES:
            target = leaves[0]
            room = torch.empty_strided(target.shape, target.stride(), dtype=target.dtype, device=self._device)
            leaves = [room, *leaves[1:]]
        self._run_real(func, leaves, spec)
        return state

    def _generator(self, kwargs: dict[str, Any]) -> torch.Generator:
        if kwargs.get("generator") is not None:
            return kwargs["generator"]
        if self._device.type == "cpu":
            return torch.default_generator
        index = self._device.index or 0
        return torch.get_device_module(self._device).default_generators[index]

    def part(self, tensor: Tensor) -> Part:
        """What it takes to make a tensor on meta later."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._numbers:
            self._numbers[storage._cdata] = len(self._storages)
            self._storages.append(storage)
        number = self._numbers[storage._cdata]
        return Part(number, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def _covers(self, part: Part) -> bool:
        return bool(torch.Size(part.shape).numel() * part.dtype.itemsize == self._storages[part.storage].nbytes())

    # -- values -------------------------------------------------------------------------------------------------------

    def is_written(self, part: Part) -> bool:
        """Whether anything was ever written to the storage of a part."""
        return bool(self._writers.get(part.storage))

    def value(self, part: Part) -> Tensor:
        """The value of a tensor, repeated from its operations; the generators stay as they are.

        Raises:
            InitialValueError: A tensor that was read has been changed since.
        """
        real: dict[int, torch.UntypedStorage] = {}
        with torch.no_grad(), _disable_current_modes():
            for index in sorted(self._needed(part.storage)):
                self._repeat(self._operations[index], real)
            return self._view(part, real)

    def _needed(self, storage: int) -> set[int]:
        """The operations that lead to the content of a storage."""
        needed: set[int] = set()
        followed: set[tuple[int, int]] = set()
        waiting = [(storage, len(self._operations))]
        while waiting:
            number, end = waiting.pop()
            for index in reversed(self._writers.get(number, [])):
                if index >= end:
                    continue
                if (number, index) in followed:
                    break
                followed.add((number, index))
                needed.add(index)
                operation = self._operations[index]
                waiting.extend((touched, index) for touched in operation.touched if touched != operation.overwrites)
                if operation.overwrites == number:
                    break
        return needed

    def _repeat(self, operation: _Operation, real: dict[int, torch.UntypedStorage]) -> None:
        args, kwargs = tree_unflatten([self._as_real(leaf, real) for leaf in operation.leaves], operation.spec)
        if operation.state is None:
            out = operation.func(*args, **kwargs)
        else:
            generator = self._generator(kwargs)
            now = generator.get_state()
            generator.set_state(operation.state)
            try:
                out = operation.func(*args, **kwargs)
            finally:
                generator.set_state(now)
        for part, made in zip(operation.outputs, tree_leaves(out), strict=True):
            if part is not None:
                storage = made.untyped_storage()
                alike = (made.stride(), made.storage_offset()) == (part.stride, part.offset)
                if part.storage not in real and alike and storage.nbytes() == self._storages[part.storage].nbytes():
                    real[part.storage] = storage
                else:  # a meta kernel promised other strides than the real one gives
                    self._view(part, real).copy_(made)

    def _as_real(self, leaf: Any, real: dict[int, torch.UntypedStorage]) -> Any:
        if isinstance(leaf, Part):
            return self._view(leaf, real)
        if isinstance(leaf, _Source):
            if leaf.tensor._version != leaf.version:
                raise InitialValueError(
                    f"a tensor of shape {tuple(leaf.tensor.shape)} from which a parameter without storage was set has"
                    " been changed since; set the parameter from a clone of it"
                )
            return leaf.tensor
        return self._device if _is_meta(leaf) else leaf

    def _view(self, part: Part, real: dict[int, torch.UntypedStorage]) -> Tensor:
        if part.storage not in real:
            size = self._storages[part.storage].nbytes()
            real[part.storage] = torch.empty(size, dtype=torch.uint8, device=self._device).untyped_storage()
        empty = torch.empty(0, dtype=part.dtype, device=self._device)
        return empty.set_(real[part.storage], part.offset, part.shape, part.stride)

    def _run_real(self, func: Any, leaves: list[Any], spec: Any) -> Any:
        real = [self.value(self.part(leaf)) if is_on_meta(leaf) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten([self._device if _is_meta(leaf) else leaf for leaf in real], spec)
        return func(*args, **kwargs)


class _Watch(TorchDispatchMode):
    """Sees every operation of a thread."""

    def __init__(self, noted: NotedOperations) -> None:
        super().__init__()
        self._noted = noted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **(kwargs or {}))
        return self._noted.run(func, args, kwargs or {})


class _AsIfReal(TorchFunctionMode):
    """What torch does not do to tensors on meta before an operation is reached."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _GET_IS_META and sys._getframe(1).f_globals.get("__name__") in _SKIPS_META:
            return False
        if func == _SET_DATA and is_on_meta(args[0]) and not is_on_meta(args[1]):
            with _disable_current_modes():  # torch refuses a change of the device
                torch._C._swap_tensor_impl(args[0], nn.Parameter(args[1].detach(), args[0].requires_grad))
            return None
        return func(*args, **(kwargs or {}))


def _is_meta(leaf: Any) -> bool:
    return isinstance(leaf, torch.device) and leaf.type == "meta"


def is_on_meta(leaf: Any) -> bool:
    """Whether something is a tensor without storage, also while such tensors pass for real."""
    return isinstance(leaf, Tensor) and leaf.device.type == "meta"


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operation writes, by its schema."""
    if not func._schema.is_mutable:
        return []
    found = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += tree_leaves(args[place] if place < len(args) else kwargs.get(argument.name))
    return [tensor for tensor in found if isinstance(tensor, Tensor)]
