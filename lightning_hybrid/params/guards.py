"""Gather on read: sharded parameters that are gathered when code outside their layer's forward reads them.

Between calls of its layer such a parameter has the class ``GuardedParameter``, so that torch dispatches every operation
on it here; code that never reads one pays nothing. The ``Parameter`` object stays the user's own.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import wraps
from typing import Any, Literal, NamedTuple, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn.modules._functions import BackwardHookFunction

from lightning_hybrid.params import store
from lightning_hybrid.patching import replaced
from lightning_hybrid.step.objects.pytree import flatten_call, rebuild_call, tensors_inside
from lightning_hybrid.step.objects.tensors import storage_id
from lightning_hybrid.step.standins.tensors import SHAPE_METHODS, SHAPE_PROPERTIES, full_shape_meta

# Gathers run in this order: the shard of a replica is a shard of what a tensor rank has; reads of experts are errors.
Level: TypeAlias = Literal["experts", "replicas", "tensor"]

_OfModuleHooks = BackwardHookFunction._backward_cls  # of `register_full_backward_hook` and its like
_P = ParamSpec("_P")
_T = TypeVar("_T")
_GATHER = "_hybrid_gather"  # attribute of a guarded parameter: a `GatherCallbacks` by level
_UNGUARDED_PROPERTIES = frozenset(
    {"requires_grad", "grad_fn", "is_leaf", "device", "dtype", "layout", "grad", "grad_dtype", "is_cuda", "names"}
    | {"_backward_hooks"}
)
_IDENTITY = frozenset(
    {"__hash__", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "is_floating_point"}
)


class ReadGuards:
    """Switch of the read guards: on while user code runs, off while a backward or an optimizer works on the shards.

    Hooks of the user on gradients run inside a backward; there the guards are on.

    Attributes:
        are_off: Whether reads are not guarded now.
        before_shard_access: Called before shards are used: they write back what user code has written to full tensors.
        after_shard_access: Called after a backward or an optimizer has used shards: full tensors follow them.
    """

    def __init__(self) -> None:
        """Turn the guards on."""
        self.are_off = False
        self.before_shard_access: list[Callable[[], None]] = []
        self.after_shard_access: list[Callable[[], None]] = []
        self._gradient_hook: Callable[[nn.Parameter, str, Any], Any] = lambda parameter, registration, hook: hook

    def hook_gradients_by(self, hook: Callable[[nn.Parameter, str, Any], Any]) -> None:
        """Register what this returns for a parameter, the name of the registering method, and a gradient hook."""
        self._gradient_hook = hook

    def registered(self, parameter: nn.Parameter, registration: str, hook: Any) -> Any:
        """The hook to register in place of a gradient hook of a parameter."""
        return self._gradient_hook(parameter, registration, hook)

    def settle(self) -> None:
        """Write back what user code has written to full tensors, before shards are used."""
        for settle in self.before_shard_access:
            settle()

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Turn the guards off inside, for a backward or an optimizer."""
        self.settle()
        with self._set_during(are_off=True):
            yield
        for refresh in self.after_shard_access:
            refresh()

    @contextlib.contextmanager
    def off_in_backwards(self) -> Iterator[None]:
        """Inside, turn the guards off during each backward, of user code too."""
        original = torch.autograd.backward

        def backward(*args: Any, **kwargs: Any) -> None:
            with contextlib.nullcontext() if self.are_off else self.off():
                original(*args, **kwargs)

        with replaced(torch.autograd, "backward", backward, reason="works on shards"):
            yield

    def as_user_code(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap user code that a backward or an optimizer calls: inside ``function`` the guards are on."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self._set_during(are_off=False):
                result = function(*args, **kwargs)
            self.settle()
            return result

        return run

    @contextlib.contextmanager
    def _set_during(self, *, are_off: bool) -> Iterator[None]:
        before, self.are_off = self.are_off, are_off
        try:
            yield
        finally:
            self.are_off = before


class GatherCallbacks(NamedTuple):
    """Callbacks that gather and update one guarded parameter."""

    guards: ReadGuards  # the switch of this run
    # returns the full tensor of a parameter; it may call ``unguard`` and return the parameter itself
    full: Callable[[nn.Parameter], Tensor]
    # called with the parameter, a full tensor that user code references or has written, and whether it got that by
    # ``.data``, where autograd does not count writes
    on_access: Callable[[nn.Parameter, Tensor, bool], None] = lambda parameter, full, by_data: None
    # returns the full gradient of a parameter; its ``.grad`` if None
    gradient: Callable[[nn.Parameter], Tensor | None] | None = None
    # called with a parameter and the full gradient to set, or None for none; sets ``.grad`` if None
    set_gradient: Callable[[nn.Parameter, Tensor | None], None] | None = None
    # returns the derivative by a full parameter, from that by what it holds; ``torch.autograd.grad`` gets ``full`` if
    # None
    derivative: Callable[[nn.Parameter, Tensor], Tensor] | None = None


class GuardedParameter(nn.Parameter):
    """A sharded parameter whose full tensor is gathered before an operation reads it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on full parameters; queries of the shape return the full shape."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        is_property = name in ("__get__", "__set__", "__delete__")
        member = func.__self__.__name__ if is_property else name
        leaves, plain = flatten_call(args, kwargs)
        found: list[tuple[int, nn.Parameter]] = [
            (position, leaf)
            for position, leaf in enumerate(leaves)
            if type(leaf) is GuardedParameter and _GATHER in leaf.__dict__
        ]
        gathers = [gather for _, leaf in found for _, gather in sorted(leaf.__dict__[_GATHER].items())]
        is_unguarded = (is_property and member in _UNGUARDED_PROPERTIES) or name in _IDENTITY
        if not gathers or (gathers[0].guards.are_off and not _is_in_gradient_hook()):
            is_unguarded = True
        elif member == "grad" and found[0][0] == 0:
            for gather in gathers:  # the first one knows the shards of the others too
                if name == "__get__" and gather.gradient is not None:
                    return gather.gradient(args[0])
                if name != "__get__" and gather.set_gradient is not None:
                    return gather.set_gradient(args[0], args[1] if name == "__set__" else None)
        if gathers and name in ("register_hook", "register_post_accumulate_grad_hook"):
            args = args[0], gathers[0].guards.registered(args[0], name, args[1])
        if is_unguarded:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if member in SHAPE_METHODS or (name == "__get__" and member in SHAPE_PROPERTIES):
            return func(full_shape_meta(args[0]), *args[1:], **kwargs)
        if name == "grad" and all(gather.derivative is not None for gather in gathers):
            return _derivatives(func, args, kwargs)
        copies: list[tuple[nn.Parameter, GatherCallbacks, Tensor, int]] = []
        for position, leaf in found:
            for _, gather in sorted(leaf.__dict__.get(_GATHER, {}).items()):  # an argument may occur twice
                leaves[position] = full = gather.full(leaf)
                if full is not leaf:
                    copies.append((leaf, gather, full, full._version))
        args, kwargs = rebuild_call(leaves, args, kwargs, plain)
        out = func(*args, **kwargs)
        if copies:
            shared = {storage_id(tensor) for tensor in tensors_inside(out)}
            for leaf, gather, full, version in copies:
                if full._version != version or storage_id(full) in shared or name == "__set__":
                    gather.on_access(leaf, full, member == "data")
        return out

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy as an ordinary parameter with the full tensor."""
        copied = nn.Parameter(self.detach().clone(), self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as an ordinary parameter with the full tensor."""
        return nn.Parameter(self.detach().clone(), self.requires_grad).__reduce_ex__(protocol)


def _derivatives(grad: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Tensor | None, ...]:
    """Run ``torch.autograd.grad`` by guarded parameters: by what they hold, whose derivatives are made full."""
    inputs = args[1] if len(args) > 1 else kwargs["inputs"]
    inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    guarded = [each.__dict__[_GATHER] if type(each) is GuardedParameter else {} for each in inputs]
    guards = next(gather.guards for gathers in guarded for gather in gathers.values())
    with guards.off():
        found = list(grad(*args, **kwargs))
    for index, (parameter, gathers) in enumerate(zip(inputs, guarded, strict=True)):
        for _, gather in sorted(gathers.items(), reverse=True):
            if gather.derivative is not None and found[index] is not None:
                found[index] = gather.derivative(parameter, found[index])
    return tuple(found)


def _is_in_gradient_hook() -> bool:
    """Whether Python code that runs in a backward is a hook on the gradient of a parameter, or of a module's outputs.

    Their nodes save no tensors, so that no layer is recomputed for them, and run no code of layers.
    """
    node = torch._C._current_autograd_node()
    return node is not None and (type(node).__name__ == "AccumulateGrad" or isinstance(node, _OfModuleHooks))


@contextlib.contextmanager
def unguarded(parameter: nn.Parameter) -> Iterator[None]:
    """Inside, a parameter that may be guarded is an ordinary one: it holds its full tensor."""
    gathers = parameter.__dict__.pop(_GATHER, None)
    if gathers is not None:
        store.set_class(parameter, nn.Parameter)
    try:
        yield
    finally:
        if gathers is not None:
            store.set_class(parameter, GuardedParameter)
            parameter.__dict__[_GATHER] = gathers


def below_read_guards(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """Run a method below the read guards and transforms of ``torch.func``: reads see shards, and gather nothing."""

    @wraps(method)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        is_transformed = torch._C._are_functorch_transforms_active()
        transforms_off = temporarily_clear_interpreter_stack() if is_transformed else contextlib.nullcontext()
        with torch._C.DisableTorchFunctionSubclass(), transforms_off:
            return method(*args, **kwargs)

    return run


def can_guard(parameter: Tensor) -> bool:
    """Whether reads of a parameter of any shape can be intercepted: it has torch's own class."""
    return type(parameter) in (nn.Parameter, GuardedParameter)


def guard(parameters: Iterable[nn.Parameter], level: Level, gather: GatherCallbacks) -> None:
    """Gather parameters that one axis sharded before they are read, from now on; skips what `can_guard` excludes."""
    for parameter in parameters:
        if type(parameter) is nn.Parameter:
            store.set_class(parameter, GuardedParameter)
            parameter.__dict__[_GATHER] = {}
        if type(parameter) is GuardedParameter:
            parameter.__dict__[_GATHER][level] = gather


def unguard(parameters: Iterable[nn.Parameter], level: Level) -> None:
    """Let reads of these parameters, guarded or not, see from now on what they hold along one axis."""
    for parameter in parameters:
        if type(parameter) is GuardedParameter:
            gathers = parameter.__dict__.get(_GATHER, {})
            gathers.pop(level, None)
            if not gathers:
                parameter.__dict__.pop(_GATHER, None)
                store.set_class(parameter, nn.Parameter)


class OutsideLayerGuard:
    """Guards parameters while a step runs, except during calls of their layers, which work on shards.

    Attributes:
        is_on: Whether a step runs.
    """

    def __init__(self, level: Level, gather: GatherCallbacks) -> None:
        self.is_on = False
        self._level, self._gather = level, gather
        self._inside: Counter[int] = Counter()  # running calls of layers, by the id of a parameter

    @contextlib.contextmanager
    def on(self, parameters: Collection[nn.Parameter]) -> Iterator[None]:
        """Guard these parameters inside, while a step runs."""
        self.is_on = True
        guard(parameters, self._level, self._gather)
        try:
            yield
        finally:
            self.is_on = False
            unguard(parameters, self._level)

    @contextlib.contextmanager
    def inside(self, members: Collection[nn.Parameter]) -> Iterator[None]:
        """Unguard the parameters of a layer inside, while its forward runs."""
        unguard(members, self._level)
        self._inside.update(map(id, members))
        try:
            yield
        finally:
            self._inside.subtract(map(id, members))
            if self.is_on:
                guard([p for p in members if not self._inside[id(p)]], self._level, self._gather)
