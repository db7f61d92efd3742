"""Tape of a layer's operations, and of the tensors that autograd saves of each.

While a layer runs, each of its operations is recorded below autograd. A tensor that autograd saves for the backward is
saved as a recipe (the operation and the values it read) where that is cheaper than the value. Results that cannot be
recomputed (of collectives, operations that write statistics, other libraries' kernels) are saved themselves.

    x ──► norm ──► n ──► linear ──► a ──► gelu ──► g ──► linear ──►      saved by autograd: x, n, a, g
    saved: x, a    recomputed in the backward: n = norm(x), g = gelu(a)

Values are identified by their storage, so that views cost nothing and need no operation of their own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_hybrid.memory.recomputable_values_and_operations import (
    GatheredValue,
    Geometry,
    Operation,
    Use,
    Value,
    materialize,
)
from lightning_hybrid.step.instrument.replay_user_activation_checkpointing import SAVES_EACH
from lightning_hybrid.step.objects.tensor_storage_and_subclasses import storage_id

# They write running statistics or a state that their schema does not declare.
_UNDECLARED_WRITES = ("batch_norm", "rnn", "lstm", "gru", "fused_moving_avg", "instance_norm")
_BELOW = torch._C.DispatchKey.ADInplaceOrView
States: TypeAlias = list[tuple[torch.Generator, Tensor]]


class OpKind(NamedTuple):
    """Effects of an operator of torch's dispatcher on its arguments."""

    is_view: bool
    is_repeatable: bool
    written: tuple[int | str, ...]
    writes_first: bool
    draws: bool
    probability: int | None  # position of the dropout probability; the operator draws nothing where that is 0


@cache
def op_kind(function: Any) -> OpKind:
    """Derives the effects from the operator's schema."""
    arguments, returns = function._schema.arguments, function._schema.returns
    tags = tuple(function.tags)
    written: list[int | str] = []
    for position, argument in enumerate(arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(argument.name if argument.kwarg_only else position)
    if function.namespace == "c10d":  # their schemas do not declare it: the first argument is written
        written = [0]
    is_view = not written and any(result.alias_info is not None for result in returns)
    if torch.Tag.inplace_view in tags:  # it changes the tensor; the storage is unchanged
        written, is_view = [], True
    is_native = function.namespace in ("aten", "prims")
    is_pure = torch.Tag.nondeterministic_bitwise not in tags
    is_pure &= not any(text in function._opname for text in _UNDECLARED_WRITES)
    returns_tensors = bool(returns) and all(str(result.type) in ("Tensor", "List[Tensor]") for result in returns)
    if len(returns) > 1:  # attention returns the state of a generator and sizes beside its tensors
        returns_tensors = all(str(result.type) in ("Tensor", "int") for result in returns)
    takes_generator = any(argument.name == "generator" for argument in arguments)
    probabilities = [position for position, argument in enumerate(arguments) if argument.name == "dropout_p"]
    return OpKind(
        is_view=is_view,
        is_repeatable=is_native and is_pure and returns_tensors and not is_view,
        written=tuple(written),
        writes_first=written == [0] and len(returns) == 1 and str(arguments[0].type) == "Tensor",
        draws=torch.Tag.nondeterministic_seeded in tags or takes_generator,
        probability=probabilities[0] if probabilities else None,
    )


class Tape(TorchDispatchMode):
    """Dispatch mode that records the operations of one run of a layer."""

    def __init__(
        self,
        inputs: Iterable[Tensor] = (),
        written: set[int] | None = None,
        gather_function: Callable[[Tensor], Callable[[], Tensor] | None] | None = None,
    ) -> None:
        """Starts an empty tape.

        Args:
            inputs: Inputs of the layer, which are no weights even if they are leaves that require a gradient.
            written: Addresses of storages from outside that a run of such a layer writes to; grows.
            gather_function: ``ParameterGatherer.view_getter`` for this layer, if no recipe may hold its parameters.
        """
        super().__init__()
        self._written = set() if written is None else written
        self._gather_function = gather_function
        self._alive: list[Tensor] = []
        self.operations: list[Operation] = []
        self.made: list[Value] = []  # results of these, in order
        self.outside: list[Value] = []
        self._values: dict[int, Value] = {}  # by the address of the storage, which each of them keeps alive
        for tensor in filter(_is_strided, inputs):
            self._value_of(tensor).is_weight = False

    # -- while the layer runs -----------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = op_kind(func)
        if kind.written:
            return self._write(kind, func, types, args, kwargs)
        if kind.is_view or not kind.is_repeatable or types or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        states = self._states(kind, args, kwargs)
        out = func(*args, **kwargs)
        self._record(func, args, kwargs, out, states)
        return out

    def _states(self, kind: OpKind, args: Any, kwargs: Any) -> States:
        """Returns the states of the generators that the operation may draw from."""
        if not kind.draws:
            return []
        if kind.probability is not None:
            position = kind.probability
            if not (args[position] if position < len(args) else kwargs.get("dropout_p", 0.0)):
                return []
        tensors = list(_tensors_in((args, kwargs)))
        device = kwargs.get("device") or (tensors[0].device if tensors else torch.device("cpu"))
        generators = [torch.default_generator]
        if torch.device(device).type == "cuda":
            generators.append(torch.cuda.default_generators[torch.device(device).index or 0])
        return [(generator, generator.get_state()) for generator in generators]

    def _record(self, func: Any, args: Any, kwargs: Any, out: Any, states: States) -> None:
        results = out if isinstance(out, tuple | list) else (out,)
        addresses = {storage_id(tensor) for tensor in _tensors_in((args, kwargs)) if _is_strided(tensor)}
        for result in results:
            if isinstance(result, Tensor) and (not _is_strided(result) or storage_id(result) in addresses):
                return None  # a view whose schema does not say so
        operation = self._operation(func, args, kwargs, states, writes_first=False)
        for result in results:
            if isinstance(result, Tensor):
                self._add_result(operation, result)
            else:
                operation.makes.append(None)

    def _operation(self, func: Any, args: Any, kwargs: Any, states: States, *, writes_first: bool) -> Operation:
        """Appends an operation, whose results are yet to be added."""
        operation = Operation(func, states, writes_first=writes_first)
        operation.args, operation.kwargs = self._uses(args, operation), self._uses(kwargs, operation)
        self.operations.append(operation)
        return operation

    def _add_result(self, operation: Operation, result: Tensor) -> None:
        value = Value(_alias(result), operation)
        operation.makes.append(weakref.ref(value))
        self._values[storage_id(result)] = value
        self.made.append(value)

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
        return Use.of(argument, value)

    def _value_of(self, tensor: Tensor) -> Value:
        value = self._values.get(storage_id(tensor))
        if value is None or value.dtype != tensor.dtype:
            gather = None if self._gather_function is None else self._gather_function(tensor)
            alias = _alias(tensor)
            value = Value(alias, None, is_weight=_is_weight(tensor)) if gather is None else GatheredValue(alias, gather)
            self.outside.append(value)
            self._values[storage_id(tensor)] = value
            if gather is None and not tensor.requires_grad and storage_id(tensor) in self._written:
                # A buffer that each run writes to: the next one may come before this one's backward.
                assert value.tensor is not None
                self._alive.append(value.tensor)
                value.copy()
        return value

    def _write(self, kind: OpKind, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operation that writes: values of the former content drop their tensor, or copy it first."""
        written = [
            tensor
            for key in kind.written
            for tensor in _tensors_in(kwargs.get(key) if isinstance(key, str) else args[key])
        ]
        are_strided = not types and all(map(_is_strided, _tensors_in((args, kwargs))))
        if kind.writes_first and kind.is_repeatable and are_strided and kwargs.get("generator") is None:
            tensor = written[0]
            value = self._values.get(storage_id(tensor))
            if value is not None and value.recipe is not None and Geometry.of(tensor) == value.geometry:
                operation = self._operation(func, args, kwargs, self._states(kind, args, kwargs), writes_first=True)
                value.drop_tensor()
                out = func(*args, **kwargs)
                self._add_result(operation, tensor)
                return out
        for tensor in written:
            if not _is_strided(tensor):
                continue
            address = storage_id(tensor)
            value = self._values.pop(address, None)
            if not tensor.requires_grad and (value is None or value.recipe is None):
                self._written.add(address)
            if value is not None and value.tensor is not None:
                if value.recipe is not None:
                    value.drop_tensor()
                elif value.num_reads:
                    value.copy()
        return func(*args, **kwargs)

    # -- saved tensors ------------------------------------------------------------------------------------------------

    def save(self, tensor: Tensor) -> Use | SavedTensor:
        """Packs a tensor of any shape for autograd (the pack hook of ``saved_tensors_hooks``)."""
        if not _is_strided(tensor):
            return SavedTensor(tensor, tensor._version)
        value = self._value_of(tensor)
        value.num_saved += 1
        if value.recipe is None and type(value) is not GatheredValue:
            return SavedTensor(tensor, tensor._version)
        if tensor.dtype != value.dtype:
            value.is_pinned = True
            return SavedTensor(tensor, tensor._version)
        return Use.of(tensor, value)

    setattr(save, SAVES_EACH, True)

    def value_of_result(self, tensor: Tensor) -> Value | None:
        """Returns the value of a tensor of any shape, if an operation of the layer made it."""
        value = self._values.get(storage_id(tensor)) if _is_strided(tensor) else None
        return value if value is not None and value.recipe is not None else None

    def close(self) -> None:
        """Seals the values after the choice of what is saved, and empties the tape."""
        for value in (*self.made, *self.outside):
            value.seal()
        self.operations, self.made, self.outside, self._values, self._alive = [], [], [], {}, []


class SavedTensor(NamedTuple):
    """A tensor saved by autograd itself."""

    tensor: Tensor
    version: int


def restore(saved: Use | SavedTensor) -> Tensor:
    """Unpacks a saved tensor, of the shape it was saved with (the unpack hook of ``saved_tensors_hooks``).

    Raises:
        RuntimeError: The tensor, or one that its recipe reads, was changed in place.
    """
    if isinstance(saved, Use):
        materialize(saved.value)
        return saved.read()
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


def _is_strided(tensor: Tensor) -> bool:
    """Returns whether a tensor is a strided view of a storage, neither lazily conjugated nor negated nor quantized."""
    return tensor.layout is torch.strided and not (
        tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.is_nested
    )


def _alias(tensor: Tensor) -> Tensor:
    """Returns a tensor with the same elements and version, outside of any autograd graph."""
    with torch._C._SetExcludeDispatchKeyGuard(_BELOW, False):
        return tensor.detach()


def _is_weight(tensor: Tensor) -> bool:
    base = tensor._base if tensor._is_view() else tensor
    return isinstance(base, nn.Parameter) or (base is not None and base.is_leaf and base.requires_grad)
