"""Autograd functions and collectives of user code, which torch's function modes do not see.

Each call of a ``torch.autograd.Function``, and each collective of ``torch.distributed`` on values of the model, is one
event. A recording only rehearses collectives: other replicas need not record at the same time.
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

from lightning_hybrid.randomness.keyed_draws import KeyedRandomness
from lightning_hybrid.step.instrument.metric_branches import without_branches
from lightning_hybrid.step.objects.pytree import flatten
from lightning_hybrid.step.standins.absent_tensors import is_absent
from lightning_hybrid.step.tracing.bound_apply import APPLIED_IN_PYTHON, BoundFunction, unseen_functions
from lightning_hybrid.step.tracing.finiteness_checks import tests_of_numbers
from lightning_hybrid.step.tracing.recording import StepError
from lightning_hybrid.step.tracing.step_mode import Current, user_line

# What each collective writes: the place of the argument that it fills, and its name.
_WRITTEN = {
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
# Where the call of a function passes by.
_APPLIED_BY = _SingleLevelFunction if APPLIED_IN_PYTHON else Function


class Unwatched:
    """Base of autograd functions that are called while one operation of a step runs, and are no event themselves."""


class Done:
    """What a rehearsed or skipped asynchronous collective returns."""

    def wait(self, *_: Any) -> bool:
        """There is nothing to wait for."""
        return True

    def is_completed(self) -> bool:
        """It is."""
        return True


def watched_functions(current: Current, bound: Iterable[BoundFunction]) -> AbstractContextManager[None]:
    """Make each autograd function and collective that a step calls one event of the current run.

    A function of ``torch.jit`` runs as it is written, since no mode sees what its interpreter does. Tests of numbers
    (``math.isnan``) know those that are not there, and metrics of torchmetrics ask no question of them.

    Args:
        current: The run.
        bound: Where the user's code holds functions by their ``apply``.
    """
    collectives = [(name, getattr(dist, name, None)) for name in _WRITTEN]
    apply = _applied(current)
    return _Replaced(
        (_APPLIED_BY, "apply", classmethod(apply)),
        *((place.owner, place.name, place.calling(partial(apply, place.function))) for place in bound),
        *((dist, name, _collected(current, name, own)) for name, own in collectives if own is not None),
        (ScriptFunction, "__call__", _as_written(current, vars(ScriptFunction)["__call__"])),
        *tests_of_numbers(current),
        *without_branches(current),
        _TOLIST,
    )


def functions_drawing_again(
    functions: Iterable[type[Function]], randomness: KeyedRandomness
) -> AbstractContextManager[None]:
    """Have functions whose backward runs their forward again, as checkpoints by hand do, draw there what they drew."""
    takes_context = [function for function in functions if function.setup_context is Function.setup_context]
    return _Replaced(*(place for function in takes_context for place in _drawing_again(function, randomness)))


def _drawing_again(function: type[Function], randomness: KeyedRandomness) -> Iterable[tuple[Any, str, Any]]:
    own_forward, own_backward = function.forward, function.backward

    @wraps(own_forward)
    def forward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            ctx._hybrid_again = randomness.again(own_backward)
        return own_forward(ctx, *args, **kwargs)

    @wraps(own_backward)
    def backward(ctx: Any, *gradients: Any) -> Any:
        return getattr(ctx, "_hybrid_again", own_backward)(ctx, *gradients)

    return (function, "forward", staticmethod(forward)), (function, "backward", staticmethod(backward))


def unseen_functions_refused(current: Current) -> AbstractContextManager[None]:
    """Have a function raise a ``StepError`` where a step calls it and nothing else here sees that."""
    return _Replaced(
        *(
            (function, "forward", _refusing(current, function))
            for function in unseen_functions()
            if "forward" in vars(function)
        )
    )


def _refusing(current: Current, function: type[Function]) -> Any:
    original = function.forward

    def forward(*args: Any, **kwargs: Any) -> Any:  # bare, since each record of a step makes hundreds of them
        watch = current.watch
        in_transform = torch._C._are_functorch_transforms_active()
        if watch is None or watch.inside_unit or in_transform or issubclass(function, Unwatched):
            return original(*args, **kwargs)
        name = function.__qualname__
        raise StepError(
            f"{user_line()}: {name} is called through an object that holds {name}.apply (a functools.partial, a list, a"
            " default argument), where a step cannot see the call; call"
            f" {name}.apply(...) itself, or keep it as a variable of a module or an attribute"
        )

    return staticmethod(forward)


def _applied(current: Current) -> Callable[..., Any]:
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        original = super(_SingleLevelFunction, cls).apply
        watch = current.watch
        if watch is None or watch.inside_unit or issubclass(cls, Unwatched):
            return original(*args, **kwargs)
        return watch.call(f"apply:{cls.__qualname__}", (), original, args, kwargs)

    return apply


def _as_written(current: Current, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        watch = current.watch
        written = getattr(self, "_torchdynamo_inline", None)
        if watch is None or written is None or (watch.inside_unit and not watch.is_recording):
            return original(self, *args, **kwargs)
        return written(*args, **kwargs)

    return call


def _collected(current: Current, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def collective(*args: Any, **kwargs: Any) -> Any:
        watch = current.watch
        if watch is None:
            return original(*args, **kwargs)
        run = _rehearsal(name) if watch.is_recording else original
        if watch.inside_unit:
            return run(*args, **kwargs)
        return watch.call(COLLECTIVE + name, (), run, args, kwargs)

    return collective


def written_by(name: str, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that a collective fills."""
    place, keyword = _WRITTEN[name.removeprefix(COLLECTIVE)]
    filled = args[place] if len(args) > place else kwargs.get(keyword)
    return [leaf for leaf in flatten(filled)[0] if isinstance(leaf, Tensor)]


def _rehearsal(name: str) -> Callable[..., Any]:
    def rehearse(*args: Any, **kwargs: Any) -> Any:
        written = written_by(name, args, kwargs)
        given = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        own = next((leaf for leaf in given if not any(leaf is tensor for tensor in written)), None)
        with torch.no_grad():
            for tensor in written:
                # As if this rank were alone: a recording may look at what it gathered from the batch.
                if own is None or is_absent(own) or is_absent(tensor) or tensor.numel() % max(own.numel(), 1):
                    tensor.mul_(1)
                elif own.numel():
                    tensor.copy_(own.reshape(-1).repeat(tensor.numel() // own.numel()).view(tensor.shape))
        return Done() if kwargs.get("async_op") else None

    return rehearse


# ``FakeTensor`` has a ``tolist`` of its own, which reads number by number; no mode sees it.
_TOLIST = (FakeTensor, "tolist", Tensor.tolist)


def tolist_seen() -> AbstractContextManager[None]:
    """Inside, the ``tolist`` of an absent tensor is seen by modes."""
    return _Replaced(_TOLIST)


class _Replaced(AbstractContextManager[None]):
    """Inside, owners have other attributes. A class, not generators: it is entered for every step."""

    def __init__(self, *places: tuple[Any, str, Any]) -> None:
        self._places = places

    def __enter__(self) -> None:
        self._own = [vars(owner).get(name, _NOTHING) for owner, name, _ in self._places]
        for owner, name, value in self._places:
            setattr(owner, name, value)

    def __exit__(self, *_: object) -> None:
        for (owner, name, _), own in zip(self._places, self._own, strict=True):
            if own is _NOTHING:
                delattr(owner, name)
            else:
                setattr(owner, name, own)


_NOTHING = object()
