"""Values of a layer that can be made again: which operation made them, from what, with which random numbers.

While a layer runs, each of its operations is noted below autograd. What autograd then wants saved for the backward is
saved as a *recipe* (the operation and the values it read) where that is cheaper than the value. No code of the user
runs a second time: an operation that is repeated has the arguments it had, so its result has the same bits. Whatever
cannot be repeated (collectives, operations that write statistics, other libraries' kernels) is kept.

    x ──► norm ──► n ──► linear ──► a ──► gelu ──► g ──► linear ──►      saved by autograd: x, n, a, g
    kept: x, a     made again in the backward: n = norm(x), g = gelu(a)

Values are known by their storage, so that views cost nothing and need no operation of their own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

# They write running statistics or a state that their schema does not tell of.
_WRITING_UNTOLD = ("batch_norm", "rnn", "lstm", "gru", "fused_moving_avg", "instance_norm")
_BELOW = torch._C.DispatchKey.ADInplaceOrView


class Geometry(NamedTuple):
    """Where the elements of a tensor lie in its storage."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> Geometry:
        return cls(tensor.size(), tensor.stride(), tensor.storage_offset())


class Value:
    """What a storage holds between two writes.

    Attributes:
        held: The tensor; None while there is only the recipe.
        geometry: Of that tensor.
        recipe: What makes it; None for what came from outside or cannot be made again.
        is_weight: Whether it is a parameter, which is there anyway.
        is_pinned: Whether something else holds the tensor.
        is_returned: Whether the layer returns it.
        num_saved: How often autograd has saved it.
        num_reads: How many recipes read it.
    """

    __slots__ = (
        "__weakref__",
        "device",
        "dtype",
        "geometry",
        "held",
        "is_pinned",
        "is_returned",
        "is_weight",
        "nbytes",
        "num_reads",
        "num_saved",
        "recipe",
        "version",
    )

    def __init__(self, held: Tensor, recipe: Operation | None, *, is_weight: bool = False) -> None:
        self.held: Tensor | None = held
        self.geometry, self.dtype, self.device, self.recipe = Geometry.of(held), held.dtype, held.device, recipe
        self.nbytes = held.untyped_storage().nbytes()
        self.is_weight, self.is_pinned, self.is_returned = is_weight, False, False
        self.num_saved = self.num_reads = 0
        self.version: int | None = None

    def lose(self) -> None:
        """Hold the recipe alone."""
        assert self.recipe is not None
        self.held, self.version = None, None

    def keep(self) -> None:
        """Hold the tensor alone."""
        self.recipe = None

    def copy(self) -> None:
        """Hold a copy, because the storage is about to be written to."""
        assert self.held is not None
        copied = torch.empty(0, dtype=self.dtype, device=self.held.device)
        self.held = copied.set_(self.held.untyped_storage().clone(), self.geometry.offset, *self.geometry[:2])

    def seal(self) -> None:
        """From now on writes are seen by the tensor's version alone."""
        if self.held is not None:
            self.version = self.held._version

    @property
    def is_there(self) -> bool:
        """Whether it is held.

        Raises:
            RuntimeError: It is held, and was written to by code outside of the layer.
        """
        if self.held is None:
            return False
        if self.version is not None and self.held._version != self.version:
            raise RuntimeError(
                f"a tensor of shape {list(self.geometry.size)} that a recomputed layer reads in its backward was"
                f" changed in place after the layer had run (version {self.held._version}, was {self.version}); write"
                " `x = x + y` for `x += y`, or take this layer out of recompute"
            )
        return True


class Use(NamedTuple):
    """An argument of an operation: a value, or a view of it."""

    value: Value
    geometry: Geometry | None  # None: as the value itself

    def tensor(self) -> Tensor:
        held = self.value.held
        assert held is not None
        return held if self.geometry is None else held.as_strided(*self.geometry)


class Operation:
    """One that can be repeated.

    Attributes:
        function: Of torch's dispatcher.
        reads: Values among its arguments.
        makes: Its results, in order, as long as anybody refers to them.
        writes_first: Whether it writes to its first argument, which is then its result.
    """

    __slots__ = ("args", "function", "kwargs", "makes", "reads", "states", "writes_first")

    def __init__(self, function: Any, states: list[tuple[torch.Generator, Tensor]], *, writes_first: bool) -> None:
        self.function, self.states, self.writes_first = function, states, writes_first
        self.args: Any = ()
        self.kwargs: Any = {}
        self.reads: list[Value] = []
        self.makes: list[weakref.ref[Value] | None] = []

    def call(self, args: Any = None) -> Any:
        """Run it on what its values hold."""
        args = tensors_of(self.args) if args is None else args
        return self.function(*args, **tensors_of(self.kwargs))

    def repeat(self) -> None:
        """Make its results again; all that it reads is there."""
        args = tensors_of(self.args)
        if self.writes_first:
            before: Value = self.args[0].value
            is_last = before.recipe is not None and before.num_reads == 1 and not before.num_saved
            if not is_last:
                args[0] = args[0].clone(memory_format=torch.preserve_format)
        saved = [(generator, generator.get_state()) for generator, _ in self.states]
        for generator, state in self.states:
            generator.set_state(state)
        try:
            out = self.call(args)
        finally:
            for generator, state in saved:
                generator.set_state(state)
        for made, tensor in zip(self.makes, out if isinstance(out, tuple | list) else (out,), strict=True):
            value = None if made is None else made()
            if value is not None and value.held is None:
                if Geometry.of(tensor) != value.geometry:
                    raise RuntimeError(f"{self.function} gave {Geometry.of(tensor)} and, before, {value.geometry}")
                value.held = tensor
        for value in self.reads:
            if value.recipe is not None and value.num_reads == 1 and not value.num_saved:
                value.lose()


def make(value: Value) -> Tensor:
    """What a value holds; made again, with what it needs for it, where it holds nothing.

    Raises:
        RuntimeError: Code outside of the layer has changed what the recipe reads.
    """
    if value.is_there:
        assert value.held is not None
        return value.held
    assert value.recipe is not None
    with torch.no_grad(), torch._C.DisableTorchFunction(), torch._C._DisableAutocast():
        waiting = [value.recipe]
        while waiting:
            missing = [read.recipe for read in waiting[-1].reads if not read.is_there]
            if missing:
                waiting += [recipe for recipe in missing if recipe is not None]
            else:
                waiting.pop().repeat()
    assert value.held is not None
    return value.held


def tensors_of(argument: Any) -> Any:
    """Arguments of an operation with tensors for their uses."""
    kind = type(argument)
    if kind is Use:
        return argument.tensor()
    if kind is list or kind is tuple:
        return [tensors_of(each) for each in argument]
    if kind is dict:
        return {name: tensors_of(each) for name, each in argument.items()}
    return argument


class Kind(NamedTuple):
    """What a function of torch's dispatcher does to its arguments."""

    is_view: bool
    is_repeatable: bool
    written: tuple[int | str, ...]
    writes_first: bool
    draws: bool
    probability: int | None  # place of the argument by which it draws nothing where that is 0


@cache
def kind_of(function: Any) -> Kind:
    """Read off the schema."""
    schema = function._schema
    arguments = schema.arguments
    written: list[int | str] = []
    for place, argument in enumerate(arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(argument.name if argument.kwarg_only else place)
    if function.namespace == "c10d":  # their schemas do not tell: what is written comes first
        written = [0]
    returns = schema.returns
    is_view = not written and any(result.alias_info is not None for result in returns)
    name = function._opname
    is_own = function.namespace in ("aten", "prims")
    is_pure = not any(part in name for part in _WRITING_UNTOLD) and torch.Tag.nondeterministic_bitwise not in tuple(
        function.tags
    )
    gives_tensors = bool(returns) and all(str(result.type) in ("Tensor", "List[Tensor]") for result in returns)
    if len(returns) > 1:  # attention returns the state of a generator and sizes beside its tensors
        gives_tensors = all(str(result.type) in ("Tensor", "int") for result in returns)
    own_generator = any(argument.name == "generator" for argument in arguments)
    probabilities = [place for place, argument in enumerate(arguments) if argument.name == "dropout_p"]
    return Kind(
        is_view=is_view,
        is_repeatable=is_own and is_pure and gives_tensors and not is_view,
        written=tuple(written),
        writes_first=written == [0] and len(returns) == 1 and str(arguments[0].type) == "Tensor",
        draws=torch.Tag.nondeterministic_seeded in tuple(function.tags) or own_generator,
        probability=probabilities[0] if probabilities else None,
    )


class Tape(TorchDispatchMode):
    """Notes the operations of one run of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.made: list[Value] = []  # by these, in order
        self.outside: list[Value] = []
        self._values: dict[int, Value] = {}
        self._storages: list[StorageWeakRef] = []  # no address is given to another storage while these are here

    # -- while the layer runs -----------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = kind_of(func)
        if kind.written:
            return self._write(kind, func, types, args, kwargs)
        if kind.is_view or not kind.is_repeatable or types or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        states = self._states(kind, args, kwargs)
        out = func(*args, **kwargs)
        self._note(func, args, kwargs, out, states)
        return out

    def _states(self, kind: Kind, args: Any, kwargs: Any) -> list[tuple[torch.Generator, Tensor]]:
        """Of the generators that the operation may draw from."""
        if not kind.draws:
            return []
        if kind.probability is not None:
            place = kind.probability
            if not (args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)):
                return []
        tensors = list(_tensors_in((args, kwargs)))
        device = kwargs.get("device") or (tensors[0].device if tensors else torch.device("cpu"))
        generators = [torch.default_generator]
        if torch.device(device).type == "cuda":
            generators.append(torch.cuda.default_generators[torch.device(device).index or 0])
        return [(generator, generator.get_state()) for generator in generators]

    def _note(
        self, func: Any, args: Any, kwargs: Any, out: Any, states: list[tuple[torch.Generator, Tensor]]
    ) -> Operation | None:
        results = out if isinstance(out, tuple | list) else (out,)
        addresses = {tensor.untyped_storage()._cdata for tensor in _tensors_in((args, kwargs)) if _has_place(tensor)}
        for result in results:
            if isinstance(result, Tensor) and (
                not _has_place(result) or result.untyped_storage()._cdata in addresses
            ):
                return None  # a view whose schema does not say so
        operation = Operation(func, states, writes_first=False)
        operation.args, operation.kwargs = self._uses(args, operation), self._uses(kwargs, operation)
        for result in results:
            value = None
            if isinstance(result, Tensor):
                value = Value(_alias(result), operation)
                self._put(result, value)
                self.made.append(value)
            operation.makes.append(None if value is None else weakref.ref(value))
        self.operations.append(operation)
        return operation

    def _uses(self, argument: Any, operation: Operation) -> Any:
        kind = type(argument)
        if kind is list or kind is tuple:
            return [self._uses(each, operation) for each in argument]
        if kind is dict:
            return {name: self._uses(each, operation) for name, each in argument.items()}
        if not isinstance(argument, Tensor):
            return argument
        value = self._value_of(argument)
        value.num_reads += 1
        operation.reads.append(value)
        geometry = Geometry.of(argument)
        return Use(value, None if geometry == value.geometry else geometry)

    def _value_of(self, tensor: Tensor) -> Value:
        value = None if not _has_place(tensor) else self._values.get(tensor.untyped_storage()._cdata)
        if value is None or value.dtype != tensor.dtype:
            value = Value(_alias(tensor), None, is_weight=_is_weight(tensor))
            self.outside.append(value)
            if _has_place(tensor):
                self._put(tensor, value)
        return value

    def _put(self, tensor: Tensor, value: Value) -> None:
        storage = tensor.untyped_storage()
        self._values[storage._cdata] = value
        self._storages.append(StorageWeakRef(storage))

    def _write(self, kind: Kind, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation that writes: what held the former content loses it, or copies it first."""
        written = [
            tensor
            for place in kind.written
            for tensor in _tensors_in(kwargs.get(place) if isinstance(place, str) else args[place])
        ]
        if kind.writes_first and kind.is_repeatable and not types and kwargs.get("generator") is None:
            tensor = written[0]
            value = self._values.get(tensor.untyped_storage()._cdata) if _has_place(tensor) else None
            if value is not None and value.recipe is not None and Geometry.of(tensor) == value.geometry:
                operation = Operation(func, self._states(kind, args, kwargs), writes_first=True)
                operation.args, operation.kwargs = self._uses(args, operation), self._uses(kwargs, operation)
                value.lose()
                out = func(*args, **kwargs)
                after = Value(_alias(tensor), operation)
                operation.makes.append(weakref.ref(after))
                self._put(tensor, after)
                self.made.append(after)
                self.operations.append(operation)
                return out
        for tensor in written:
            if not _has_place(tensor):
                continue
            value = self._values.pop(tensor.untyped_storage()._cdata, None)
            if value is not None and value.held is not None:
                if value.recipe is not None:
                    value.lose()
                elif value.num_reads:
                    value.copy()
        return func(*args, **kwargs)

    # -- what autograd saves ------------------------------------------------------------------------------------------

    def save(self, tensor: Tensor) -> Saved | Kept:
        """What autograd is given in place of a tensor."""
        value = self._values.get(tensor.untyped_storage()._cdata) if _has_place(tensor) else None
        if value is None or value.recipe is None:
            if value is None:
                value = self._value_of(tensor)
            value.num_saved += 1
            return Kept(tensor, tensor._version)
        value.num_saved += 1
        if tensor.dtype != value.dtype:
            value.is_pinned = True
            return Kept(tensor, tensor._version)
        geometry = Geometry.of(tensor)
        return Saved(Use(value, None if geometry == value.geometry else geometry))

    def known(self, tensor: Tensor) -> Value | None:
        """The value that this tensor shows, if an operation of the layer made it."""
        value = self._values.get(tensor.untyped_storage()._cdata) if _has_place(tensor) else None
        return value if value is not None and value.recipe is not None else None

    def close(self) -> None:
        """The layer has run, and it is decided what is kept."""
        for value in (*self.made, *self.outside):
            value.seal()
        self.operations, self.made, self.outside, self._values, self._storages = [], [], [], {}, []


class Saved(NamedTuple):
    """A value that may be a recipe, saved by autograd."""

    use: Use


class Kept(NamedTuple):
    """A tensor saved by autograd as it is."""

    tensor: Tensor
    version: int


def restore(saved: Saved | Kept) -> Tensor:
    """What autograd saved.

    Raises:
        RuntimeError: It, or what it is made of, was changed in place.
    """
    if isinstance(saved, Saved):
        tensor = make(saved.use.value)
        return tensor if saved.use.geometry is None else tensor.as_strided(*saved.use.geometry)
    if saved.tensor._version != saved.version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor"
            f" of shape {list(saved.tensor.shape)} is at version {saved.tensor._version}; expected version"
            f" {saved.version} instead"
        )
    return saved.tensor


def _tensors_in(argument: Any) -> Iterator[Tensor]:
    if isinstance(argument, Tensor):
        yield argument
    elif isinstance(argument, list | tuple):
        for each in argument:
            yield from _tensors_in(each)
    elif isinstance(argument, Mapping):
        for each in argument.values():
            yield from _tensors_in(each)


def _has_place(tensor: Tensor) -> bool:
    """Whether its elements lie in a storage as they are."""
    return tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg() and not tensor.is_quantized


def _alias(tensor: Tensor) -> Tensor:
    """The same elements and version, without a part in any graph."""
    with torch._C._SetExcludeDispatchKeyGuard(_BELOW, False):
        return tensor.detach()


def _is_weight(tensor: Tensor) -> bool:
    base = tensor._base if tensor._is_view() else tensor
    return isinstance(base, nn.Parameter) or (base is not None and base.is_leaf and base.requires_grad)
