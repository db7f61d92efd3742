"""A check that a unit does in a run what its plan was proved for.

A plan holds for the code that ran in trials. So before the first forward with other plain arguments, shapes, attributes
or modules than before, the unit is tried, and nothing of that stays: the lines of code that call torch must be among
those of the trials, and its results those of the full unit. Units that read values of tensors are not shared
at all. What is decided by nothing of this, such as a global variable, is not seen.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_hybrid.equivalence.output_differences import difference_of
from lightning_hybrid.step.module_state.snapshot import (
    PLAIN,
    Content,
    ModuleState,
    Place,
    can_be_put_back,
    is_state,
    reachable,
)
from lightning_hybrid.step.objects.deep_copy import copied
from lightning_hybrid.step.objects.lru_cache import Recent
from lightning_hybrid.step.objects.pytree import flatten, flatten_call
from lightning_hybrid.step.recording.guards import plain_state
from lightning_hybrid.step.standins.deferred_tensors import Deferred, whole_of, with_wholes
from lightning_hybrid.step.tracing.call_trace import CodePath, Step, calls_of, is_of_user

_VALUE_READS = frozenset(
    {"__bool__", "__int__", "__float__", "__index__", "__array__", "item", "tolist", "numpy", "equal", "allclose"}
)
_FUNCTIONS = (FunctionType, BuiltinFunctionType)
_MOST_KEYS = 512
_MOST_COMPARED = 64  # keys of one unit whose numbers are compared; an attribute may be another one in each batch
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}
Forward = Callable[..., Any]


def value_read_in(steps: Iterable[Step]) -> str:
    """The first line at which user code reads values of tensors, by which it may decide.

    Args:
        steps: What a ``CodePath`` has noted.
    """
    for function, frames in steps:
        if frames and is_of_user(frames[0]) and getattr(function, "__name__", "") in _VALUE_READS:
            return f"{frames[0][0].co_filename}:{frames[0][1]}"
    return ""


class _Tried(NamedTuple):
    """What a forward gave.

    Attributes:
        results: The leaves of what it returned.
        kept: The shapes of tensors that it left in attributes, by place.
        drew: Whether random numbers were drawn.
    """

    results: list[Any]
    kept: dict[Place, tuple[int, ...]]
    drew: bool


class ProvedCalls:
    """What is known of the forwards of one unit.

    Attributes:
        apart: Entered around trials, whose random draws count for nothing.
    """

    def __init__(
        self,
        unit: nn.Module,
        calls: frozenset[int],
        *,
        note: Callable[[CodePath | None], None],
        agree: Callable[[bool], bool],
    ) -> None:
        """Begin with nothing known.

        Args:
            unit: The user's.
            calls: Of trials; see ``calls_of``.
            note: Has the sharded forwards that come note what they call.
            agree: Whether any of the ranks that share the unit says so; collective over them.
        """
        self._unit, self._calls, self._note, self._agree = unit, calls, note, agree
        self._seen: Recent[Hashable, str] = Recent(_MOST_KEYS)
        self._num_compared = 0
        self.apart: Callable[[], AbstractContextManager[Any]] = partial(torch.random.fork_rng, devices=())

    def otherwise_at(self, sharded: Forward, full: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Where a forward does something that was not proved, in words; "" if it does not.

        Args:
            sharded: The unit's forward as it is shared.
            full: Its own.
            args: Of the call.
            kwargs: Likewise.
        """
        key = self._key(args, kwargs)
        if key not in self._seen:
            self._seen[key] = self._look(sharded, full, args, kwargs)
        return self._seen[key]

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        """What a forward may decide by: plain arguments and attributes, shapes, modules, and what torch is set to."""
        named = list(self._unit.named_modules())
        modules = [module for _, module in named]
        given = len(args), *kwargs, *[_signature_of(leaf) for leaf in flatten_call(args, kwargs)[0]]
        held = [
            _held(value)
            for module in modules
            for name, value in module.__dict__.items()
            if type(value) not in PLAIN and is_state(name)
        ]
        # Every rank must find the same keys new: nothing here is told apart by its address.
        kinds = tuple([(fqn, type(module).__qualname__) for fqn, module in named])
        switches = torch.is_grad_enabled(), torch.is_autocast_enabled(), torch.is_autocast_enabled("cpu")
        return given, switches, kinds, tuple(filter(None, held)), tuple(plain_state(modules))

    def _look(self, sharded: Forward, full: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        path, failure, found = CodePath(), "", None
        self._note(path)
        try:
            found = self._tried(sharded, args, kwargs)
        except Exception as error:  # what it is shows when it runs full
            failure = f"{type(error).__name__}: {error}"
        finally:
            self._note(None)
        new = (line for call, line in calls_of(path.steps).items() if call not in self._calls)
        where = next(new, "") or value_read_in(path.steps) or failure
        if self._agree(bool(where)):
            return where or "a line that only another rank has come to"
        assert found is not None
        if self._num_compared >= _MOST_COMPARED:
            return ""
        self._num_compared += 1
        where = self._difference(found, sharded, full, args, kwargs)
        return where or "its results" if self._agree(bool(where)) else ""

    def _difference(
        self, found: _Tried, sharded: Forward, full: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> str:
        """How the results of the sharded unit differ from those of the full one."""
        modes = [(module, module.training) for module in self._unit.modules() if module.training and found.drew]
        for module, _ in modes:  # ranks draw different numbers where they share
            module.training = False
        try:
            if found.drew:
                try:
                    found = self._tried(sharded, args, kwargs)
                except Exception as error:
                    return f"{type(error).__name__}: {error}"
            try:
                wanted = self._tried(full, *with_wholes(args, kwargs))
            except Exception:  # such as for a cache that holds what this rank shares
                return ""
        finally:
            for module, mode in modes:
                module.training = mode
        if len(found.results) != len(wanted.results):
            return f"{len(wanted.results)} results, not {len(found.results)}"
        if found.kept != wanted.kept:
            return "what it keeps in attributes"
        pairs = zip(found.results, wanted.results, strict=True)
        return next((f"its results: {text}" for text in (_differ(*pair) for pair in pairs) if text), "")

    def _tried(self, run: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Tried:
        """Run a forward of which nothing stays."""
        state = ModuleState(self._unit)
        tensors = [leaf for _, leaf in reachable(self._unit, plain=False) if isinstance(leaf, Tensor)]
        contents = [Content(leaf) for leaf in tensors if can_be_put_back(leaf)]
        on_device = any(p.device.type != "cpu" for p in self._unit.parameters())  # whose generator is not looked at
        try:
            # Hooks of the user see nothing of a trial. Detached: a node that holds its own result is never freed.
            with self.apart(), saved_tensors_hooks(torch.Tensor.detach, _as_it_is):
                drawn = torch.get_rng_state()
                args, kwargs = copied((args, kwargs), _copy_of, modules=False)
                leaves = [whole_of(leaf) for leaf in flatten(run(*args, **kwargs))[0]]
                leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
                held = reachable(self._unit, plain=False)
                kept = {place: tuple(whole_of(leaf).shape) for place, leaf in held if isinstance(leaf, Tensor)}
                drew = not torch.equal(drawn, torch.get_rng_state()) or on_device
            return _Tried(leaves, kept, drew)
        finally:
            state.restore()
            for content in contents:
                content.restore()


def _signature_of(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.requires_grad
    return leaf if type(leaf) in PLAIN else type(leaf)


def _held(value: Any) -> Any:
    if isinstance(value, numpy.ndarray):
        return zlib.crc32(numpy.ascontiguousarray(value).tobytes())
    return f"{value.__module__}.{value.__qualname__}" if isinstance(value, _FUNCTIONS) else None


def _copy_of(tensor: Tensor) -> Tensor:
    if isinstance(tensor, Deferred | nn.Parameter):
        return tensor
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _as_it_is(tensor: Any) -> Any:
    return tensor


def _differ(found: Any, wanted: Any) -> str:
    if isinstance(wanted, Tensor) and isinstance(found, Tensor) and found.shape == wanted.shape:
        if not wanted.is_floating_point() or not bool(wanted.isfinite().all()):
            return ""
        found = found.to(wanted.dtype)
    elif type(wanted) in PLAIN and found != wanted:
        return f"{wanted!r}, not {found!r}"
    dtype = wanted.dtype if isinstance(wanted, Tensor) else torch.float64
    return difference_of(found, wanted, _TOLERANCES.get(dtype, 5e-2)) or ""
