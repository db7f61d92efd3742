"""A check that the forwards of a sharded unit do in a run what its plan was proved for.

A plan holds for the code that ran in trials. So before the first forward with other plain arguments, shapes, attributes
or modules than before, the unit is run on trial, without side effects: only lines of code that the proof has run may
call torch, and the results must equal the full unit's. Where it runs other lines, its plan is proved again with the
arguments of that call; if that fails, the unit runs full. Units that read values of tensors are not sharded at all. A
branch on anything else, such as a global variable, is not detected.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import AbstractContextManager
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_hybrid.equivalence.difference import difference_of
from lightning_hybrid.errors import is_out_of_memory
from lightning_hybrid.mesh import is_lost_connection
from lightning_hybrid.step.module_state.snapshots import (
    PLAIN,
    AttributePath,
    ModuleSnapshot,
    TensorSnapshot,
    can_restore,
    is_state,
    reachable_leaves,
)
from lightning_hybrid.step.objects.cache import BoundedLRUDict
from lightning_hybrid.step.objects.modules import copied
from lightning_hybrid.step.objects.names import READS
from lightning_hybrid.step.objects.pytree import flatten, flatten_call
from lightning_hybrid.step.recording.guards import PlainState
from lightning_hybrid.step.standins.tensors import ShardedTensorBase, materialize, materialize_call
from lightning_hybrid.step.tracing.asides import taking_asides
from lightning_hybrid.step.tracing.lines import TorchCall, TorchCallSites, is_user_frame, user_call_sites
from lightning_hybrid.tensor.runtime.unit import ShardedUnit

_VALUE_READS = READS - {"__repr__", "__str__"}
_FUNCTIONS = (FunctionType, BuiltinFunctionType)
_COMPARED = frozenset({bool, int, str})  # numbers with a fraction may be times
_MOST_KEYS = 512
_MOST_COMPARED = 64  # keys of one unit whose results are compared; an attribute may differ in each batch
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}
_LOOSEST = 5e-2  # in narrower dtypes
Forward = Callable[..., Any]
Prove = Callable[[frozenset[int], tuple[Any, ...], dict[str, Any]], frozenset[int]]


def value_read_in(calls: Iterable[TorchCall]) -> str:
    """The first line at which user code reads values of tensors, on which it may branch; "" if there is none."""
    for function, frames in calls:
        if (name := getattr(function, "__name__", "")) not in _VALUE_READS:
            continue
        num_inner = next((index for index, frame in enumerate(frames) if is_user_frame(frame)), len(frames))
        # Some methods of tensors are Python, and dispatch the call themselves.
        if num_inner < len(frames) and (num_inner == 0 or frames[num_inner - 1][0].co_name == name):
            return f"{frames[num_inner][0].co_filename}:{frames[num_inner][1]}"
    return ""


def dims_of_several(leaves: Iterable[Any]) -> dict[int, str]:
    """The dims of arguments that have more than one entry, by a hash that is equal on every rank, each in words.

    A plan is not proved for them by a call with one entry: attention to one position gives its value.
    """
    tensors = [(k, leaf) for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    dims = [(k, dim) for k, tensor in tensors for dim, length in enumerate(tensor.shape) if length > 1]
    return {zlib.crc32(f"{k} {dim}".encode()): f"dim {dim} of argument {k}, which had one entry" for k, dim in dims}


def _ends_step(error: Exception) -> bool:
    """Whether an error is not one of the unit's code, and no other rank comes to where the ranks vote."""
    return is_out_of_memory(error) or is_lost_connection(error)


class _Trial(NamedTuple):
    """The outcome of one forward on trial."""

    results: list[Any]  # the leaves of its result
    kept: dict[AttributePath, Any]  # shapes of tensors and other plain values of modules after it, by path
    written: dict[AttributePath, Tensor]  # the tensors among them that it made or wrote
    drew: bool  # whether random numbers were drawn


class _HashedOnce:
    """A part of a key with many values, which are hashed once."""

    def __init__(self, value: Hashable) -> None:
        self._value, self._hash = value, hash(value)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _HashedOnce) and self._value == other._value


class ProvedCalls:
    """The checks of the forwards of one unit, one for each combination of arguments, attributes and modules."""

    def __init__(
        self,
        unit: nn.Module,
        calls: frozenset[int],
        runner: ShardedUnit,
        prove: Prove,
        isolated: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """Begins without results; ``calls`` are the lines that called torch in trials.

        ``prove`` proves the plan for a call of other lines; it returns the lines of that proof, none if it fails.
        Trials run in ``isolated`` contexts, which keep their random draws from advancing the run's random state.
        """
        self._unit, self._calls, self._runner, self._prove, self._isolated = unit, calls, runner, prove, isolated
        self._checked: BoundedLRUDict[Hashable, str] = BoundedLRUDict(_MOST_KEYS)
        self._last: tuple[Hashable, str] = (), ""  # the result of the last call
        self._num_compared = 0
        self._state = PlainState([])
        self._state_key: Hashable = ()

    def first_deviation(self, sharded: Forward, full: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Where a forward does something that was not proved, in words; "" if it does not."""
        key = self._key(args, kwargs)
        if key != self._last[0]:
            if key not in self._checked:
                self._checked[key] = self._check(sharded, full, args, kwargs)
            self._last = key, self._checked[key]
        return self._last[1]

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        """The values that a forward may branch on: plain arguments and attributes, shapes, modules, torch's modes."""
        if not self._state.is_current():
            self._state, self._state_key = self._read_state()
        inputs = len(args), *kwargs, *[_signature_of(leaf) for leaf in flatten_call(args, kwargs)[0]]
        switches = torch.is_grad_enabled(), torch.is_autocast_enabled(), torch.is_autocast_enabled("cpu")
        return inputs, switches, self._state_key

    def _read_state(self) -> tuple[PlainState, Hashable]:
        """The state of the unit, and its key."""
        named = list(self._unit.named_modules())
        modules = [module for _, module in named]
        attributes = [
            value
            for module in modules
            for name, value in module.__dict__.items()
            if type(value) not in PLAIN and is_state(name)
        ]
        # Every rank must find the same keys new: nothing here is distinguished by its address.
        kinds = tuple([(fqn, type(module).__qualname__, module.training) for fqn, module in named])
        state = PlainState(modules)
        key = kinds, tuple(filter(None, map(_attribute_key, attributes))), tuple(state.values)
        # The entries of an array may change in place.
        changes_in_place = any(isinstance(value, numpy.ndarray) for value in attributes)
        return PlainState([]) if changes_in_place else state, _HashedOnce(key)

    def _check(self, sharded: Forward, full: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        path, failure, found = TorchCallSites(), "", None
        errors: list[Exception] = []
        self._runner.set_path(path)
        try:
            found = self._trial(sharded, args, kwargs)
        except Exception as error:  # an error of the user's code is raised again when it runs full
            if _ends_step(error):  # the other ranks wait for this one in a collective of the forward
                raise
            failure = f"{type(error).__name__}: {error}"
            errors.append(error)
        finally:
            self._runner.set_path(None)
        where = value_read_in(path.calls) or failure
        self._meet_with(errors)
        if self._runner.any_rank(bool(where)):
            return where or "a line that only another rank has reached"
        assert found is not None
        where = self._unproved_line(path, args, kwargs)
        if self._runner.any_rank(bool(where)):  # no rank runs code of the user before this vote
            return where or "a line that only another rank has reached"
        if self._num_compared >= _MOST_COMPARED:
            return ""
        self._num_compared += 1
        where = self._difference(found, sharded, full, args, kwargs, errors)
        self._meet_with(errors)
        return where or "its results" if self._runner.any_rank(bool(where)) else ""

    def _unproved_line(self, path: TorchCallSites, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """The first line that has called torch for which the plan is not proved; "" if there is none."""
        lines = user_call_sites(path.calls) | dims_of_several(flatten((args, kwargs))[0])
        if lines.keys() - self._calls:
            self._calls |= self._prove(frozenset(lines) - self._calls, args, kwargs)
        return next((line for call, line in lines.items() if call not in self._calls), "")

    def _meet_with(self, errors: list[Exception]) -> None:
        """Go on with the other ranks; ``errors`` of this rank are dropped, whose frames refer to tensors."""
        self._runner.meet(errors.pop() if errors else None)

    def _difference(
        self,
        found: _Trial,
        sharded: Forward,
        full: Forward,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        errors: list[Exception],
    ) -> str:
        """How results of the sharded unit differ from the full one's; an error is added to ``errors``."""
        modes = [(module, module.training) for module in self._unit.modules() if module.training and found.drew]
        for module, _ in modes:  # ranks draw different numbers in sharded regions
            module.training = False
        try:
            if found.drew:
                try:
                    found = self._trial(sharded, args, kwargs)
                except Exception as error:
                    if _ends_step(error):
                        raise
                    errors.append(error)
                    return f"{type(error).__name__}: {error}"
            try:
                wanted = self._trial(full, *materialize_call(args, kwargs))
            except Exception as error:  # such as for a cache that holds this rank's shards
                if is_lost_connection(error):
                    raise
                errors.append(error)
                return ""
        finally:
            for module, mode in modes:
                module.training = mode
        if len(found.results) != len(wanted.results):
            return f"{len(wanted.results)} results, not {len(found.results)}"
        for kept, other in ((found.kept, wanted.kept), (_names(found.written), _names(wanted.written))):
            differing = [path for path in {**other, **kept} if kept.get(path) != other.get(path)]
            if differing:
                path = differing[0]
                return f"its attribute {path.attribute}: {other.get(path)}, not {kept.get(path)}"
        pairs = zip(found.results, wanted.results, strict=True)
        if text := next(filter(None, (_differ(*pair) for pair in pairs)), ""):
            return f"its results: {text}"
        differences = ((path, _differ(tensor, wanted.written[path])) for path, tensor in found.written.items())
        return next((f"the values of its attribute {path.attribute}: {text}" for path, text in differences if text), "")

    def _trial(self, run: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Trial:
        """Runs a forward, and restores the state of the unit."""
        state = ModuleSnapshot(self._unit)
        tensors = [leaf for _, leaf in reachable_leaves(self._unit, plain=False) if isinstance(leaf, Tensor)]
        contents = {id(leaf): TensorSnapshot(leaf) for leaf in tensors if can_restore(leaf)}
        on_device = any(p.device.type != "cpu" for p in self._unit.parameters())  # whose generator is not checked
        try:
            # The user's saved-tensor hooks do not run. Detached: a node that holds its own result is never freed.
            with self._isolated(), saved_tensors_hooks(torch.Tensor.detach, lambda saved: saved):
                drawn = torch.get_rng_state()
                args, kwargs = copied((args, kwargs), _copy_of, modules=False)
                with taking_asides() as asides:  # they are compared, and do not reach the step
                    result = run(*args, **kwargs)
                leaves = [materialize(leaf) for leaf in flatten((result, asides))[0]]
                leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
                kept, written = self._state_after(contents)
                drew = not torch.equal(drawn, torch.get_rng_state()) or on_device
            return _Trial(leaves, kept, written, drew)
        finally:
            state.restore()
            for content in contents.values():
                content.restore()

    def _state_after(
        self, before: Mapping[int, TensorSnapshot]
    ) -> tuple[dict[AttributePath, Any], dict[AttributePath, Tensor]]:
        """The shapes of tensors and the plain values in attributes, and the tensors that a forward made or wrote."""
        kept: dict[AttributePath, Any] = {}
        written: dict[AttributePath, Tensor] = {}
        for path, leaf in reachable_leaves(self._unit):
            if isinstance(leaf, Tensor):
                snapshot, value = before.get(id(leaf)), materialize(leaf)
                kept[path] = tuple(value.shape)
                if can_restore(value) and (snapshot is None or not snapshot.is_here()):
                    written[path] = value.detach().clone()
            elif type(leaf) in _COMPARED:
                kept[path] = leaf
        return kept, written


def _names(written: Mapping[AttributePath, Tensor]) -> dict[AttributePath, str]:
    return dict.fromkeys(written, "written")


def _signature_of(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.requires_grad
    return leaf if type(leaf) in PLAIN else type(leaf)


def _attribute_key(value: Any) -> Any:
    if isinstance(value, numpy.ndarray):
        return zlib.crc32(numpy.ascontiguousarray(value).tobytes())
    return f"{value.__module__}.{value.__qualname__}" if isinstance(value, _FUNCTIONS) else None


def _copy_of(tensor: Tensor) -> Tensor:
    if isinstance(tensor, ShardedTensorBase | nn.Parameter):
        return tensor
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _differ(found: Any, wanted: Any) -> str:
    if isinstance(wanted, Tensor) and isinstance(found, Tensor) and found.shape == wanted.shape:
        if not wanted.is_floating_point() or not bool(wanted.isfinite().all()):
            return ""
        found = found.to(wanted.dtype)
    elif type(wanted) in PLAIN and found != wanted:
        return f"{wanted!r}, not {found!r}"
    dtype = wanted.dtype if isinstance(wanted, Tensor) else torch.float64
    # Under autocast a result in float32 is one of products in a narrower dtype.
    autocast = torch.is_autocast_enabled() or torch.is_autocast_enabled("cpu")
    return difference_of(found, wanted, _LOOSEST if autocast else _TOLERANCES.get(dtype, _LOOSEST)) or ""
