"""Autograd functions of user code, which function modes do not intercept: patched, so that each call is one event.

Whether a step has code of the user run in its backward: autograd functions, and hooks on gradients.

Such code need not be linear in the gradient that it receives. A function that adds the gradient of a router's auxiliary
loss adds it in full, however small the incoming gradient is.

Patches for collectives of user code: each ``torch.distributed`` call on values of the model is one event of a step.

A recording replaces them by a dry run, since other replicas need not record at the same time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import numpy
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import Function, _SingleLevelFunction
from torch.jit import ScriptFunction

from lightning_hybrid.errors import ControlFlowError, StepError
from lightning_hybrid.patching import ReplacedAll
from lightning_hybrid.randomness.keyed import KeyedRandomness
from lightning_hybrid.step.objects.pytree import flatten
from lightning_hybrid.step.standins.numbers import TOLIST_PATCH, branch_message, source_values
from lightning_hybrid.step.standins.tensors import is_absent
from lightning_hybrid.step.tracing.metrics import branchless_normalization
from lightning_hybrid.step.tracing.mode import CurrentRun, user_line

# Whether each call of an autograd function runs a method that is written in Python: before torch 2.14.
APPLIED_IN_PYTHON = isinstance(vars(Function).get("apply"), classmethod)
# The class whose ``apply`` every call of an autograd function runs.
APPLY_OWNER = _SingleLevelFunction if APPLIED_IN_PYTHON else Function


class NotIntercepted:
    """Base of autograd functions that run as part of another operation of a step, and are no event themselves."""


def intercepted_functions(current: CurrentRun) -> AbstractContextManager[None]:
    """Make each autograd function and collective that a step calls one event of the current run.

    A function of ``torch.jit`` runs as Python, since no mode intercepts its interpreter. Checks of numbers
    (``math.isnan``) refuse absent ones, and metrics of torchmetrics do not branch on their values.
    """
    patches = (
        (APPLY_OWNER, "apply", classmethod(_intercepted_apply(current))),
        (ScriptFunction, "__call__", _uncompiled_script(current, vars(ScriptFunction)["__call__"])),
        *collective_patches(current),
        *_number_checks(current),
        *branchless_normalization(current),
        TOLIST_PATCH,
    )
    return ReplacedAll(patches, reason="autograd functions, collectives and checks of numbers are nodes of a step")


def functions_with_repeated_draws(
    functions: Iterable[type[Function]], randomness: KeyedRandomness
) -> AbstractContextManager[None]:
    """Let functions whose backward reruns their forward, as hand-written checkpoints do, draw equal numbers again."""
    takes_context = [function for function in functions if function.setup_context is Function.setup_context]
    patches = (_with_repeated_draws(function, randomness) for function in takes_context)
    return ReplacedAll(patches, reason="backwards repeat the draws of forwards")


class _Repeated(NamedTuple):
    """What torch takes for the class of a function in one backward; it runs after the patches are gone."""

    backward: Callable[..., Any]
    vjp: Callable[..., Any] = Function.vjp


def _with_repeated_draws(function: type[Function], randomness: KeyedRandomness) -> tuple[Any, str, Any]:
    user_forward, user_backward = function.forward, function.backward

    @wraps(user_forward)
    def forward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        again = user_backward if torch.compiler.is_compiling() else randomness.again(user_backward)
        if again is not user_backward:
            ctx._forward_cls = _Repeated(again)
        return user_forward(ctx, *args, **kwargs)

    return function, "forward", staticmethod(forward)


def refuse_uninterceptable_functions(current: CurrentRun) -> AbstractContextManager[None]:
    """Let a function raise a ``StepError`` where a step calls it in a way that is not intercepted."""
    # Where each call runs Python, all calls are intercepted.
    functions = [] if APPLIED_IN_PYTHON else [each for each in _subclasses() if "forward" in vars(each)]
    patches = ((function, "forward", _refuse_call(current, function)) for function in functions)
    return ReplacedAll(patches, reason="refuses calls that a recording does not see")


def _refuse_call(current: CurrentRun, function: type[Function]) -> Any:
    original = function.forward

    def forward(*args: Any, **kwargs: Any) -> Any:  # without functools.wraps: each recording creates hundreds
        watch = current.glue
        in_transform = torch._C._are_functorch_transforms_active()
        if watch is None or in_transform or issubclass(function, NotIntercepted):
            return original(*args, **kwargs)
        name = function.__qualname__
        raise StepError(
            f"{user_line()}: {name} is called through an object that holds {name}.apply (a variable, a"
            f" functools.partial, a list), where the recording does not see the call; call {name}.apply(...) directly",
            entry="function-apply",
        )

    return staticmethod(forward)


def _intercepted_apply(current: CurrentRun) -> Callable[..., Any]:
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        original = super(_SingleLevelFunction, cls).apply
        watch = current.glue
        if watch is None or issubclass(cls, NotIntercepted):
            return original(*args, **kwargs)
        return watch.call(f"apply:{cls.__qualname__}", (), original, args, kwargs)

    return apply


def _number_checks(current: CurrentRun) -> Iterator[tuple[Any, str, Any]]:
    """Checks of numbers by C code, which would see the NaN of an absent one and let the step branch on it."""
    for module, name in itertools.product((math, numpy), ("isnan", "isinf", "isfinite")):
        yield module, name, _refusing_absent(current, getattr(module, name))


def _refusing_absent(current: CurrentRun, original: Callable[..., Any]) -> Callable[..., Any]:
    def check(value: Any, *args: Any, **kwargs: Any) -> Any:
        watch = current.glue
        if watch is not None:
            is_absent = isinstance(value, Tensor) and watch.is_absent_here(value)
            if is_absent or source_values(value) is not None:
                raise ControlFlowError(branch_message(watch.numbers_read or user_line()), entry="branch")
        return original(value, *args, **kwargs)

    return check


def _uncompiled_script(current: CurrentRun, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        watch = current.watch
        written = getattr(self, "_torchdynamo_inline", None)
        if watch is None or written is None or (watch.inside_unit and not watch.is_recording):
            return original(self, *args, **kwargs)
        return written(*args, **kwargs)

    return call


def _subclasses(of: type[Function] = Function) -> Iterator[type[Function]]:
    for function in of.__subclasses__():
        yield function
        yield from _subclasses(function)


def user_functions() -> list[type[Function]]:
    """The autograd functions that are defined neither by torch nor by this package."""
    return [each for each in _subclasses() if is_user_function(each)]


def is_user_function(function: Any) -> bool:
    """Whether an autograd function, or a hook, is defined neither by torch nor by this package."""
    return not function.__module__.startswith(("torch.", "lightning_hybrid."))


class BackwardCode(ReplacedAll):
    """Context that notes what the forwards inside leave for their backwards; enter it after other instruments.

    Attributes:
        has_functions: Whether an autograd function of user code was applied.
        has_hooks: Whether user code has registered a hook on the gradient of a tensor.
    """

    def __init__(self) -> None:
        super().__init__(self._replacements(), reason="notes code of the user that runs in the backward")
        self.has_functions = self.has_hooks = False

    def __enter__(self) -> BackwardCode:  # type: ignore[override]
        super().__enter__()
        return self

    @property
    def is_empty(self) -> bool:
        """Whether backwards are linear in the gradient of the loss, as far as user code is concerned."""
        return not (self.has_functions or self.has_hooks)

    def _replacements(self) -> Any:
        before = vars(APPLY_OWNER).get("apply")  # of another instrument
        register_hook = Tensor.register_hook

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled() and is_user_function(cls) and not issubclass(cls, NotIntercepted):
                self.has_functions = True
            if isinstance(before, classmethod):
                return before.__func__(cls, *args, **kwargs)
            original: Any = super(_SingleLevelFunction, cls)
            return original.apply(*args, **kwargs)

        def register(tensor: Tensor, hook: Any) -> Any:
            self.has_hooks |= is_user_function(hook if isinstance(hook, FunctionType | MethodType) else type(hook))
            return register_hook(tensor, hook)

        register.__name__ = "register_hook"  # by which modes know it
        yield APPLY_OWNER, "apply", classmethod(apply)
        yield Tensor, "register_hook", register


# The output argument of each collective: its position and its name.
_OUTPUT_ARGUMENTS = {
    "all_reduce": (0, "tensor"),
    "reduce": (0, "tensor"),
    "broadcast": (0, "tensor"),
    "all_gather": (0, "tensor_list"),
    "all_gather_into_tensor": (0, "output_tensor"),
    "all_gather_single": (0, "output"),
    "reduce_scatter": (0, "output"),
    "reduce_scatter_tensor": (0, "output"),
    "reduce_scatter_single": (0, "output"),
    "all_to_all": (0, "output_tensor_list"),
    "all_to_all_single": (0, "output"),
    "gather": (1, "gather_list"),
    "scatter": (0, "tensor"),
}
COLLECTIVE = "collective:"


class CompletedWork:
    """The work handle that an asynchronous collective returns where it does not run."""

    def wait(self, *_: Any) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Always true."""
        return True


def collective_patches(current: CurrentRun) -> Sequence[tuple[Any, str, Any]]:
    """Replacements, as (module, name, function), that make each collective one event of the current run."""
    originals = [(name, getattr(dist, name, None)) for name in _OUTPUT_ARGUMENTS]
    return [(dist, name, _intercepted_collective(current, name, run)) for name, run in originals if run is not None]


def _intercepted_collective(current: CurrentRun, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def collective(*args: Any, **kwargs: Any) -> Any:
        watch = current.watch
        if watch is None:
            return original(*args, **kwargs)
        run = _dry_run(name) if watch.is_recording else original
        if watch.inside_unit:
            return run(*args, **kwargs)
        return watch.call(COLLECTIVE + name, (), run, args, kwargs)

    return collective


def collective_outputs(name: str, args: Any, kwargs: Any) -> list[Tensor]:
    """The output tensors, of any shapes, of a call of a collective of ``torch.distributed``."""
    position, keyword = _OUTPUT_ARGUMENTS[name.removeprefix(COLLECTIVE)]
    output = args[position] if len(args) > position else kwargs.get(keyword)
    return [leaf for leaf in flatten(output)[0] if isinstance(leaf, Tensor)]


def _dry_run(name: str) -> Callable[..., Any]:
    def dry_run(*args: Any, **kwargs: Any) -> Any:
        written = collective_outputs(name, args, kwargs)
        tensors = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        source = next((leaf for leaf in tensors if not any(leaf is tensor for tensor in written)), None)
        with torch.no_grad():
            for tensor in written:
                # The result of a group of one rank: the step may read what it gathered from the batch.
                if source is None or is_absent(source) or is_absent(tensor) or tensor.numel() % max(source.numel(), 1):
                    tensor.mul_(1)
                elif source.numel():
                    tensor.copy_(source.reshape(-1).repeat(tensor.numel() // source.numel()).view(tensor.shape))
        return CompletedWork() if kwargs.get("async_op") else None

    return dry_run
