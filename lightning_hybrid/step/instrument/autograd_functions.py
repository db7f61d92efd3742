"""Patches for autograd functions and collectives of user code, which torch's function modes do not intercept.

Each call of a ``torch.autograd.Function``, and each collective of ``torch.distributed`` on values of the model, is one
event. A recording replaces collectives by a dry run, since other replicas need not record at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import Function, _SingleLevelFunction
from torch.jit import ScriptFunction

from lightning_hybrid.patching import ReplacedAll
from lightning_hybrid.randomness.keyed_draws import KeyedRandomness
from lightning_hybrid.step.instrument.patch_torchmetrics_branches import branchless_normalization
from lightning_hybrid.step.objects.pytree import flatten
from lightning_hybrid.step.standins.absent_tensors import is_absent
from lightning_hybrid.step.tracing.find_stored_autograd_apply import (
    APPLIED_IN_PYTHON,
    BoundApply,
    functions_with_builtin_apply,
)
from lightning_hybrid.step.tracing.finiteness_checks import number_check_patches
from lightning_hybrid.step.tracing.intercept_step_operations import CurrentRun, user_line
from lightning_hybrid.step.tracing.recording import StepError

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
# The class whose ``apply`` every call of an autograd function runs.
_APPLY_OWNER = _SingleLevelFunction if APPLIED_IN_PYTHON else Function


class NotIntercepted:
    """Base of autograd functions that run as part of another operation of a step, and are no event themselves."""


class CompletedWork:
    """The work handle that an asynchronous collective returns where it does not run."""

    def wait(self, *_: Any) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Always true."""
        return True


def intercepted_functions(current: CurrentRun, bound: Iterable[BoundApply]) -> AbstractContextManager[None]:
    """Make each autograd function and collective that a step calls one event of the current run.

    A function of ``torch.jit`` runs as Python, since no mode intercepts its interpreter. Checks of numbers
    (``math.isnan``) handle absent ones, and metrics of torchmetrics do not branch on their values.

    Args:
        current: The current run of a step.
        bound: The ``apply`` methods that user code stores.
    """
    collectives = [(name, getattr(dist, name, None)) for name in _OUTPUT_ARGUMENTS]
    apply = _intercepted_apply(current)
    patches = (
        (_APPLY_OWNER, "apply", classmethod(apply)),
        *((one.owner, one.name, one.replacement(partial(apply, one.function))) for one in bound),
        *((dist, name, _intercepted_collective(current, name, run)) for name, run in collectives if run is not None),
        (ScriptFunction, "__call__", _uncompiled_script(current, vars(ScriptFunction)["__call__"])),
        *number_check_patches(current),
        *branchless_normalization(current),
        _TOLIST,
    )
    return ReplacedAll(patches, reason="autograd functions, collectives and checks of numbers are nodes of a step")


def functions_with_repeated_draws(
    functions: Iterable[type[Function]], randomness: KeyedRandomness
) -> AbstractContextManager[None]:
    """Let functions whose backward reruns their forward, as hand-written checkpoints do, draw equal numbers again."""
    takes_context = [function for function in functions if function.setup_context is Function.setup_context]
    patches = (patch for function in takes_context for patch in _patched_methods(function, randomness))
    return ReplacedAll(patches, reason="backwards repeat the draws of forwards")


def _patched_methods(function: type[Function], randomness: KeyedRandomness) -> Iterable[tuple[Any, str, Any]]:
    user_forward, user_backward = function.forward, function.backward

    @wraps(user_forward)
    def forward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            ctx._hybrid_again = randomness.again(user_backward)
        return user_forward(ctx, *args, **kwargs)

    @wraps(user_backward)
    def backward(ctx: Any, *gradients: Any) -> Any:
        return getattr(ctx, "_hybrid_again", user_backward)(ctx, *gradients)

    return (function, "forward", staticmethod(forward)), (function, "backward", staticmethod(backward))


def refuse_uninterceptable_functions(current: CurrentRun) -> AbstractContextManager[None]:
    """Let a function raise a ``StepError`` where a step calls it in a way that is not intercepted."""
    functions = [function for function in functions_with_builtin_apply() if "forward" in vars(function)]
    patches = ((function, "forward", _refuse_call(current, function)) for function in functions)
    return ReplacedAll(patches, reason="refuses calls that a recording does not see")


def _refuse_call(current: CurrentRun, function: type[Function]) -> Any:
    original = function.forward

    def forward(*args: Any, **kwargs: Any) -> Any:  # without functools.wraps: each recording creates hundreds
        watch = current.watch
        in_transform = torch._C._are_functorch_transforms_active()
        if watch is None or watch.inside_unit or in_transform or issubclass(function, NotIntercepted):
            return original(*args, **kwargs)
        name = function.__qualname__
        raise StepError(
            f"{user_line()}: {name} is called through an object that holds {name}.apply (a functools.partial, a list, a"
            " default argument), where a step cannot see the call; call"
            f" {name}.apply(...) itself, or keep it as a variable of a module or an attribute"
        )

    return staticmethod(forward)


def _intercepted_apply(current: CurrentRun) -> Callable[..., Any]:
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        original = super(_SingleLevelFunction, cls).apply
        watch = current.watch
        if watch is None or watch.inside_unit or issubclass(cls, NotIntercepted):
            return original(*args, **kwargs)
        return watch.call(f"apply:{cls.__qualname__}", (), original, args, kwargs)

    return apply


def _uncompiled_script(current: CurrentRun, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        watch = current.watch
        written = getattr(self, "_torchdynamo_inline", None)
        if watch is None or written is None or (watch.inside_unit and not watch.is_recording):
            return original(self, *args, **kwargs)
        return written(*args, **kwargs)

    return call


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
    """The output tensors of a call of a collective."""
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


# ``FakeTensor.tolist`` overrides torch's and reads number by number; no mode intercepts it.
_TOLIST = (FakeTensor, "tolist", Tensor.tolist)


def interceptable_tolist() -> AbstractContextManager[None]:
    """Let function modes intercept the ``tolist`` of absent tensors."""
    return ReplacedAll([_TOLIST], reason="function modes see tolist")
