"""A recording of initialisation operations on meta tensors, replayed later on real memory.

Inside ``recording()``, tensors on the meta device behave as real ones. An operation that creates or writes one is
recorded with its inputs and, if it draws, with the generator's state; it draws once on temporary memory, so that the
generator advances as usual. ``value`` replays the operations on which one tensor depends.

    recorded uniform_(a)     normal_(a)      b = a @ a
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

from lightning_hybrid.errors import InitialValueError
from lightning_hybrid.step.objects.names import names

_META = torch.device("meta")
_aten = torch.ops.aten
_GET_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
# Modules of torch that skip tensors on meta or warn of them; their operations are recorded like all others.
_SKIPS_META = frozenset({"torch.nn.init", "torch.nn.modules.module"})
# Operations whose results are uninitialised memory.
_EMPTY = frozenset(
    {"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided"}
)
# Operations that write all of their first argument without reading it.
_OVERWRITES = frozenset(
    f"aten::{name}_"
    for name in names("bernoulli cauchy copy exponential fill geometric log_normal normal random uniform zero")
)


@dataclass(frozen=True)
class StorageView:
    """A tensor as a view of a recorded storage: its number there, dtype, shape, strides and offset."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass
class _Source:
    """A real tensor that a recorded operation reads; replaced by a copy before it changes."""

    tensor: Tensor
    version: int


@dataclass(frozen=True)
class _Operation:
    """One recorded operation; its meta tensors are ``StorageView`` objects, its real tensors ``_Source`` objects."""

    func: Any
    leaves: list[Any]
    spec: Any
    outputs: tuple[StorageView | None, ...]
    touched: frozenset[int]
    overwrites: int | None
    state: Tensor | None


class RecordedInitOps:
    """Operations recorded on tensors without storage, and the values that result from them."""

    def __init__(self, device: torch.device) -> None:
        """Take ``device`` (the device on which values are drawn and computed)."""
        self._device = device
        self._numbers: dict[int, int] = {}
        self._storages: list[torch.UntypedStorage] = []  # referenced, so that the keys of `_numbers` stay unique
        self._operations: list[_Operation] = []
        self._writers: dict[int, list[int]] = {}
        self._sources: dict[int, list[_Source]] = {}
        self._uninitialized: dict[int, StorageWeakRef] = {}

    # -- recording ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record the operations inside."""
        try:
            with _MetaAsReal(), _RecordingMode(self):
                yield
        finally:
            self._uninitialized.clear()

    def has_record_of(self, tensor: Tensor) -> bool:
        """Whether a tensor on meta, of any shape, is a view of a recorded storage."""
        return tensor.untyped_storage()._cdata in self._numbers

    def is_uninitialized(self, tensor: Tensor) -> bool:
        """Whether a real tensor of any shape is memory allocated inside that has not been written."""
        return tensor.untyped_storage()._cdata in self._uninitialized

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation: with real memory where no meta tensor is involved, otherwise on meta, and record it."""
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        written = _written_tensors(func, args, kwargs)
        self._freeze_sources(written)
        if not any(is_on_meta(tensor) for tensor in tensors) and not _is_meta(kwargs.get("device")):
            out = func(*args, **kwargs)
            self._track_uninitialized(func, out, written)
            return out
        makes_tensors = any("Tensor" in str(returned.type) for returned in func._schema.returns)
        if any(not is_on_meta(tensor) for tensor in written) or not (makes_tensors or written):
            return self._run_real(func, leaves, spec)  # a real tensor is written, or a number read
        state = self._draw(func, leaves, spec, kwargs)
        if func is _aten._to_copy.default and kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": _META}  # the device of a parameter is chosen when it gets its value
        try:
            out = func(*args, **kwargs)
        except NotImplementedError:  # the shape of the result depends on values
            if state is not None:
                self._generator(kwargs).set_state(state)
            return self._run_real(func, leaves, spec)
        self._record(func, leaves, spec, written, out, state)
        return out

    def _track_uninitialized(self, func: Any, out: Any, written: list[Tensor]) -> None:
        """Update which real tensors are uninitialised memory."""
        if func._schema.name in _EMPTY:
            if out.layout == torch.strided:
                self._uninitialized[out.untyped_storage()._cdata] = StorageWeakRef(out.untyped_storage())
            return
        for tensor in written:
            if tensor.layout == torch.strided:
                self._uninitialized.pop(tensor.untyped_storage()._cdata, None)

    def _record(self, func: Any, leaves: list[Any], spec: Any, written: list[Tensor], out: Any, state: Any) -> None:
        views = [self.view_of(leaf) if is_on_meta(leaf) else leaf for leaf in leaves]
        touched = {view.storage for view in views if isinstance(view, StorageView)}
        outputs = [self.view_of(leaf) if is_on_meta(leaf) else None for leaf in tree_leaves(out)]
        made = tuple(None if view is None or view.storage in touched else view for view in outputs)
        targets = {self.view_of(tensor).storage for tensor in written} | {view.storage for view in made if view}
        if not targets or func._schema.name in _EMPTY:
            return  # a view, or memory that has not been written
        overwrites = None
        if func._schema.name in _OVERWRITES and self._covers_storage(first := self.view_of(written[0])):
            overwrites = first.storage
        inputs = [self._source(leaf) if isinstance(leaf, Tensor) else leaf for leaf in views]
        operation = _Operation(func, inputs, spec, made, frozenset(touched | targets), overwrites, state)
        for target in targets:
            self._writers.setdefault(target, []).append(len(self._operations))
        self._operations.append(operation)

    def _source(self, tensor: Tensor) -> _Source:
        source = _Source(tensor, tensor._version)
        if tensor.layout == torch.strided:
            self._sources.setdefault(tensor.untyped_storage()._cdata, []).append(source)
        return source

    def _freeze_sources(self, written: list[Tensor]) -> None:
        """Copy real tensors that recorded operations read before they are written."""
        for tensor in written:
            if tensor.layout == torch.strided:
                for source in self._sources.pop(tensor.untyped_storage()._cdata, []):
                    source.tensor = source.tensor.clone()
                    source.version = source.tensor._version

    def _draw(self, func: Any, leaves: list[Any], spec: Any, kwargs: dict[str, Any]) -> Tensor | None:
        """Advance the generator as the operation would; returns the state before, None if it does not draw."""
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

    def view_of(self, tensor: Tensor) -> StorageView:
        """The view, of its shape, of a recorded storage from which a tensor on meta is computed later."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._numbers:
            self._numbers[storage._cdata] = len(self._storages)
            self._storages.append(storage)
        number = self._numbers[storage._cdata]
        return StorageView(number, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def _covers_storage(self, view: StorageView) -> bool:
        return bool(torch.Size(view.shape).numel() * view.dtype.itemsize == self._storages[view.storage].nbytes())

    # -- values -------------------------------------------------------------------------------------------------------

    def is_written(self, view: StorageView) -> bool:
        """Whether an operation that writes the storage of a view has been recorded."""
        return bool(self._writers.get(view.storage))

    def value(self, view: StorageView) -> Tensor:
        """Compute the value of a view, a tensor of its shape, by replaying operations; generators do not advance.

        ``InitialValueError`` is raised if a real tensor that an operation read has changed since.
        """
        real: dict[int, torch.UntypedStorage] = {}
        with torch.no_grad(), _disable_current_modes():
            for index in sorted(self._required_ops(view.storage)):
                self._replay(self._operations[index], real)
            return self._real_view(view, real)

    def _required_ops(self, storage: int) -> set[int]:
        """Indices of the operations on which the content of a storage depends."""
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

    def _replay(self, operation: _Operation, real: dict[int, torch.UntypedStorage]) -> None:
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
        for view, made in zip(operation.outputs, tree_leaves(out), strict=True):
            if view is not None:
                storage = made.untyped_storage()
                aligned = (made.stride(), made.storage_offset()) == (view.stride, view.offset)
                if view.storage not in real and aligned and storage.nbytes() == self._storages[view.storage].nbytes():
                    real[view.storage] = storage
                else:  # the meta kernel and the real one gave different strides
                    self._real_view(view, real).copy_(made)

    def _as_real(self, leaf: Any, real: dict[int, torch.UntypedStorage]) -> Any:
        if isinstance(leaf, StorageView):
            return self._real_view(leaf, real)
        if isinstance(leaf, _Source):
            if leaf.tensor._version != leaf.version:
                raise InitialValueError(
                    f"a tensor of shape {tuple(leaf.tensor.shape)} from which a parameter without storage was set has"
                    " been changed since; set the parameter from a clone of it",
                    entry="meta-source",
                )
            return leaf.tensor
        return self._device if _is_meta(leaf) else leaf

    def _real_view(self, view: StorageView, real: dict[int, torch.UntypedStorage]) -> Tensor:
        if view.storage not in real:
            size = self._storages[view.storage].nbytes()
            real[view.storage] = torch.empty(size, dtype=torch.uint8, device=self._device).untyped_storage()
        empty = torch.empty(0, dtype=view.dtype, device=self._device)
        return empty.set_(real[view.storage], view.offset, view.shape, view.stride)

    def _run_real(self, func: Any, leaves: list[Any], spec: Any) -> Any:
        real = [self.value(self.view_of(leaf)) if is_on_meta(leaf) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten([self._device if _is_meta(leaf) else leaf for leaf in real], spec)
        return func(*args, **kwargs)


class _RecordingMode(TorchDispatchMode):
    """Passes every operation of a thread to the recording."""

    def __init__(self, recorded_ops: RecordedInitOps) -> None:
        super().__init__()
        self._recorded = recorded_ops

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **(kwargs or {}))
        return self._recorded.run(func, args, kwargs or {})


class _MetaAsReal(TorchFunctionMode):
    """Makes torch treat meta tensors as real ones where it would skip them or refuse."""

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
    """Whether ``leaf`` is a meta tensor, also while ``is_meta`` is patched."""
    return isinstance(leaf, Tensor) and leaf.device.type == "meta"


def _written_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operation writes in place, by its schema."""
    if not func._schema.is_mutable:
        return []
    found = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += tree_leaves(args[position] if position < len(args) else kwargs.get(argument.name))
    return [tensor for tensor in found if isinstance(tensor, Tensor)]
