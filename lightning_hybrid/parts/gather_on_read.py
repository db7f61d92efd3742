"""Gather on read: sharded parameters gathered when code reads them that is not their layer's forward.

Between the calls of its layer such a parameter has another class, so that torch asks here before any operation on it:
code that never reads one pays nothing. The object stays the user's own.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn

from lightning_hybrid.step.objects.pytree import flatten_call, memory_of, rebuild_call, tensors_inside
from lightning_hybrid.step.standins.absent_tensors import SHAPE_METHODS, SHAPE_PROPERTIES, as_whole

# Asked in this order: a shard of a replica is cut over tensor ranks before; experts give an error.
Level: TypeAlias = Literal["experts", "replicas", "tensor"]

_GATHER = "_hybrid_gather"  # attribute of a guarded parameter: a `Gather` by level
_OWN = frozenset(
    {"requires_grad", "grad_fn", "is_leaf", "device", "dtype", "layout", "grad", "_backward_hooks", "is_cuda", "names"}
)
_IDENTITY = frozenset(
    {"__hash__", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "is_floating_point"}
)


class Guards:
    """Whether reads are those of the user's code; a backward and an optimizer work on the shards.

    Attributes:
        are_off: Whether they are not.
        before_shards: Called before shards are worked on: what user code has written to full tensors goes there.
    """

    def __init__(self) -> None:
        """They are."""
        self.are_off = False
        self.before_shards: list[Callable[[], None]] = []

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """A backward or an optimizer runs inside."""
        for settle in self.before_shards:
            settle()
        yield from self._while(True)

    def users(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, which a backward or an optimizer calls; it is the user's code."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self._on():
                return function(*args, **kwargs)

        return run

    @contextlib.contextmanager
    def _on(self) -> Iterator[None]:
        yield from self._while(False)

    def _while(self, are_off: bool) -> Iterator[None]:
        before, self.are_off = self.are_off, are_off
        try:
            yield
        finally:
            self.are_off = before


class Gather(NamedTuple):
    """How the full tensor of a guarded parameter is had.

    Attributes:
        guards: Of the run.
        full: Gives it, of the parameter; it may call ``unguard`` and return the parameter itself.
        handed: Called with the parameter, a full tensor that user code now holds or has written into, and whether it
            holds that by ``.data``, where autograd does not count writes.
        gradient: Gives the full gradient, of the parameter; its ``.grad`` if None.
        set_gradient: Called with the parameter and a full gradient that it is to have; sets ``.grad`` if None.
    """

    guards: Guards
    full: Callable[[nn.Parameter], Tensor]
    handed: Callable[[nn.Parameter, Tensor, bool], None] = lambda parameter, full, by_data: None
    gradient: Callable[[nn.Parameter], Tensor | None] | None = None
    set_gradient: Callable[[nn.Parameter, Tensor], None] | None = None


class GuardedParameter(nn.Parameter):
    """A parameter whose full content is gathered before it is read."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on full parameters; what is asked of a shape is that of the full one."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        is_property = name in ("__get__", "__set__", "__delete__")
        asked = func.__self__.__name__ if is_property else name
        leaves, plain = flatten_call(args, kwargs)
        found: list[tuple[int, nn.Parameter]] = [
            (place, leaf)
            for place, leaf in enumerate(leaves)
            if type(leaf) is GuardedParameter and _GATHER in leaf.__dict__
        ]
        gathers = [gather for _, leaf in found for _, gather in sorted(leaf.__dict__[_GATHER].items())]
        own = (is_property and asked in _OWN) or name in _IDENTITY
        if not gathers or gathers[0].guards.are_off:
            own = True
        elif asked == "grad" and gathers[-1].gradient is not None and found[0][0] == 0:
            if name == "__get__":
                return gathers[-1].gradient(args[0])
            if name == "__set__" and args[1] is not None and gathers[-1].set_gradient is not None:
                return gathers[-1].set_gradient(args[0], args[1])
        if own:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if asked in SHAPE_METHODS or (name == "__get__" and asked in SHAPE_PROPERTIES):
            return func(as_whole(args[0]), *args[1:], **kwargs)
        copies: list[tuple[nn.Parameter, Gather, Tensor, int]] = []
        for place, leaf in found:
            for _, gather in sorted(leaf.__dict__.get(_GATHER, {}).items()):  # the same may be there twice
                leaves[place] = full = gather.full(leaf)
                if full is not leaf:
                    copies.append((leaf, gather, full, full._version))
        args, kwargs = rebuild_call(leaves, args, kwargs, plain)
        out = func(*args, **kwargs)
        if copies:
            shared = {memory_of(tensor) for tensor in tensors_inside(out)}
            for leaf, gather, full, version in copies:
                if full._version != version or memory_of(full) in shared or name == "__set__":
                    gather.handed(leaf, full, asked == "data")
        return out

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """An ordinary parameter with the full content."""
        copied = nn.Parameter(self.detach().clone(), self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As an ordinary parameter with the full content."""
        return nn.Parameter(self.detach().clone(), self.requires_grad).__reduce_ex__(protocol)


def can_guard(parameter: Tensor) -> bool:
    """Whether reads of a parameter can be seen: it is of torch's own class."""
    return type(parameter) in (nn.Parameter, GuardedParameter)


def guard(parameters: Iterable[nn.Parameter], level: Level, gather: Gather) -> None:
    """From now on, have parameters gathered before they are read.

    Args:
        parameters: Each holds a shard; those of other classes than torch's own are left alone.
        level: Over which ranks; shards over replicas are gathered first.
        gather: Gives the full tensors.
    """
    for parameter in parameters:
        if type(parameter) is nn.Parameter:
            cast(Any, parameter).__class__ = GuardedParameter
            parameter.__dict__[_GATHER] = {}
        if type(parameter) is GuardedParameter:
            parameter.__dict__[_GATHER][level] = gather


def unguard(parameters: Iterable[nn.Parameter], level: Level) -> None:
    """From now on, code that reads parameters finds what they hold over these ranks.

    Args:
        parameters: Guarded or not.
        level: Over which ranks.
    """
    for parameter in parameters:
        if type(parameter) is GuardedParameter:
            gathers = parameter.__dict__.get(_GATHER, {})
            gathers.pop(level, None)
            if not gathers:
                parameter.__dict__.pop(_GATHER, None)
                cast(Any, parameter).__class__ = nn.Parameter


class OutsideLayers:
    """Guards parameters while a step runs, but not during calls of their layers, which work on shards.

    Attributes:
        is_on: Whether a step runs.
    """

    def __init__(self, level: Level, gather: Gather) -> None:
        """Args: level, gather: as ``guard``."""
        self.is_on = False
        self._level, self._gather = level, gather
        self._inside: Counter[int] = Counter()  # calls of layers under way, by the id of a parameter

    @contextlib.contextmanager
    def on(self, parameters: Collection[nn.Parameter]) -> Iterator[None]:
        """A step runs inside; its code outside of layers that reads one of these parameters has it gathered."""
        self.is_on = True
        guard(parameters, self._level, self._gather)
        try:
            yield
        finally:
            self.is_on = False
            unguard(parameters, self._level)

    @contextlib.contextmanager
    def inside(self, own: Collection[nn.Parameter]) -> Iterator[None]:
        """A layer that has these parameters runs inside."""
        unguard(own, self._level)
        self._inside.update(map(id, own))
        try:
            yield
        finally:
            self._inside.subtract(map(id, own))
            if self.is_on:
                guard([p for p in own if not self._inside[id(p)]], self._level, self._gather)
