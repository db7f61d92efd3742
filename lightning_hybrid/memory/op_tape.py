"""A tape of a layer's operations, and of what autograd saves of each.

While a layer runs, each of its operations is noted below autograd. What autograd then wants saved for the backward is
saved as a recipe (the operation and the values it read) where that is cheaper than the value. Whatever cannot be
repeated (collectives, operations that write statistics, other libraries' kernels) is kept.

    x ──► norm ──► n ──► linear ──► a ──► gelu ──► g ──► linear ──►      saved by autograd: x, n, a, g
    kept: x, a     made again in the backward: n = norm(x), g = gelu(a)

Values are known by their storage, so that views cost nothing and need no operation of their own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_hybrid.memory.recomputable_values import Geometry, Lent, Operation, Use, Value, make
from lightning_hybrid.step.instrument.activation_checkpointing import SAVES_EACH

# They write running statistics or a state that their schema does not tell of.
_WRITING_UNTOLD = ("batch_norm", "rnn", "lstm", "gru", "fused_moving_avg", "instance_norm")
_BELOW = torch._C.DispatchKey.ADInplaceOrView


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
    if torch.Tag.inplace_view in tuple(function.tags):  # of the tensor; its storage has what it had
        written, is_view = [], True
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

    def __init__(
        self,
        given: Iterable[Tensor] = (),
        written: set[int] | None = None,
        giver: Callable[[Tensor], Callable[[], Tensor] | None] | None = None,
    ) -> None:
        """Begin.

        Args:
            given: What the layer is called with, which is no weight even where it has no history.
            written: Addresses of storages from outside that a run of such a layer writes to; grows.
            giver: What gives a tensor of the layer's parameters later, if these are not to be held; see ``Lender``.
        """
        super().__init__()
        self._written = set() if written is None else written
        self._giver = giver
        self._alive: list[Tensor] = []
        self.operations: list[Operation] = []
        self.made: list[Value] = []  # by these, in order
        self.outside: list[Value] = []
        self._values: dict[int, Value] = {}  # by the address of the storage, which each of them holds
        for tensor in filter(_has_place, given):
            self._value_of(tensor).is_weight = False

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

    def _note(self, func: Any, args: Any, kwargs: Any, out: Any, states: list[tuple[torch.Generator, Tensor]]) -> None:
        results = out if isinstance(out, tuple | list) else (out,)
        addresses = {tensor.untyped_storage()._cdata for tensor in _tensors_in((args, kwargs)) if _has_place(tensor)}
        for result in results:
            if isinstance(result, Tensor) and (not _has_place(result) or result.untyped_storage()._cdata in addresses):
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
        value = self._values.get(tensor.untyped_storage()._cdata)
        if value is None or value.dtype != tensor.dtype:
            give = None if self._giver is None else self._giver(tensor)
            alias = _alias(tensor)
            value = Value(alias, None, is_weight=_is_weight(tensor)) if give is None else Lent(alias, give)
            self.outside.append(value)
            self._put(tensor, value)
            if give is None and not tensor.requires_grad and tensor.untyped_storage()._cdata in self._written:
                # A buffer that each run writes to: the next one may come before this one's backward.
                assert value.held is not None
                self._alive.append(value.held)
                value.copy()
        return value

    def _put(self, tensor: Tensor, value: Value) -> None:
        self._values[tensor.untyped_storage()._cdata] = value

    def _write(self, kind: Kind, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation that writes: what held the former content loses it, or copies it first."""
        written = [
            tensor
            for place in kind.written
            for tensor in _tensors_in(kwargs.get(place) if isinstance(place, str) else args[place])
        ]
        has_places = not types and all(map(_has_place, _tensors_in((args, kwargs))))
        if kind.writes_first and kind.is_repeatable and has_places and kwargs.get("generator") is None:
            tensor = written[0]
            value = self._values.get(tensor.untyped_storage()._cdata)
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
            address = tensor.untyped_storage()._cdata
            value = self._values.pop(address, None)
            if not tensor.requires_grad and (value is None or value.recipe is None):
                self._written.add(address)
            if value is not None and value.held is not None:
                if value.recipe is not None:
                    value.lose()
                elif value.num_reads:
                    value.copy()
        return func(*args, **kwargs)

    # -- what autograd saves ------------------------------------------------------------------------------------------

    def save(self, tensor: Tensor) -> Saved | Kept:
        """What autograd is given in place of a tensor."""
        if not _has_place(tensor):
            return Kept(tensor, tensor._version)
        value = self._value_of(tensor)
        value.num_saved += 1
        if value.recipe is None and type(value) is not Lent:
            return Kept(tensor, tensor._version)
        if tensor.dtype != value.dtype:
            value.is_pinned = True
            return Kept(tensor, tensor._version)
        geometry = Geometry.of(tensor)
        return Saved(Use(value, None if geometry == value.geometry else geometry))

    setattr(save, SAVES_EACH, True)

    def known(self, tensor: Tensor) -> Value | None:
        """The value that this tensor shows, if an operation of the layer made it."""
        value = self._values.get(tensor.untyped_storage()._cdata) if _has_place(tensor) else None
        return value if value is not None and value.recipe is not None else None

    def close(self) -> None:
        """The layer has run, and it is decided what is kept."""
        for value in (*self.made, *self.outside):
            value.seal()
        self.operations, self.made, self.outside, self._values, self._alive = [], [], [], {}, []


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
    return tensor.layout is torch.strided and not (
        tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.is_nested
    )


def _alias(tensor: Tensor) -> Tensor:
    """The same elements and version, without a part in any graph."""
    with torch._C._SetExcludeDispatchKeyGuard(_BELOW, False):
        return tensor.detach()


def _is_weight(tensor: Tensor) -> bool:
    base = tensor._base if tensor._is_view() else tensor
    return isinstance(base, nn.Parameter) or (base is not None and base.is_leaf and base.requires_grad)
