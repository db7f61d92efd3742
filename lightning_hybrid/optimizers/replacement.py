"""The replaced ``step`` of an optimizer: what is done around its own step, in one order, and for some parameters only.

Each replacement calls the one before it, so that what is done first in a step stands last in ``Place``.
"""

from __future__ import annotations

import contextlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from enum import IntEnum
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer

from lightning_hybrid.patching import replace, wraps

STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")  # attributes of an optimizer
# Hooks on the steps of all optimizers are attributes of torch's module.
HOOKS_OF_ALL = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
ALL_OPTIMIZERS = sys.modules[Optimizer.__module__]


class Place(IntEnum):
    """Where a replacement stands around an optimizer's own step, from the inside to the outside."""

    FUSED = 0  # next to the kernel, which must get plain tensors
    FLOAT32 = 1  # within all that gathers, shards or moves parameters, which have their own dtype there
    FULL = 2  # full parameters, at owners or wherever the step reads them
    SEARCH = 3  # losses of a closure, for a step that calls it several times
    STATES = 4  # offloaded states come before any parameter is gathered
    SHARDS = 5  # a step that the user's code calls, which sees full parameters outside
    GUARDS = 6  # reads of parameters within such a step, by whatever is inside
    BACKWARD = 7  # what the backward has stepped is left out of all that is inside
    HOOKS = 8  # hooks of the user see the step as a whole


_places: WeakKeyDictionary[Optimizer, list[Place]] = WeakKeyDictionary()  # of replacements, from the inside


def replace_step(
    optimizer: Optimizer, step: Callable[..., Any], place: Place | None, *, reason: str
) -> Callable[[], None]:
    """Replace the step of one optimizer by a function that is called like the method; return the undo.

    The new step has the attributes that learning rate schedulers have set on the old one. A replacement without a
    ``place`` may come at any time.
    """
    places = _places.setdefault(optimizer, [])
    if place is not None:
        assert not places or places[-1] < place, f"{places[-1]!r} is inside of {place!r}"
        places.append(place)

    @wraps(optimizer.step)
    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._opt_called = True  # as the scheduler's own wrapper notes, which is replaced
        return step(self, *args, **kwargs)

    put_back = replace(optimizer, "step", MethodType(counted, optimizer), reason=reason)

    def undo() -> None:
        if place in places:
            places.remove(place)
        put_back()

    return undo


def is_replaced(optimizer: Optimizer) -> bool:
    """Whether something is done around the own step of an optimizer."""
    return bool(_places.get(optimizer))


def step_after_closure(
    optimizer: Optimizer, step: Callable[[dict[str, Any]], None], place: Place, *, reason: str
) -> Callable[[], None]:
    """Replace the step by one that begins after the closure, with the other arguments of the call; return the undo."""

    def run(_: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        step(kwargs)
        return loss

    return replace_step(optimizer, run, place, reason=reason)


@contextlib.contextmanager
def without_step_hooks(owner: Any, names: Sequence[str] = STEP_HOOKS) -> Iterator[None]:
    """Take the hooks of an optimizer, or of all, off inside."""
    hooks = {name: owner.__dict__.get(name) for name in names}
    try:
        for name in names:
            owner.__dict__[name] = OrderedDict()
        yield
    finally:
        for name, saved in hooks.items():
            owner.__dict__[name] = saved


@contextlib.contextmanager
def step_hooks_once(optimizer: Optimizer) -> Iterator[None]:
    """Call the hooks of ``optimizer`` around a step that is made of several calls, in which they are taken off."""
    hooks = [list((optimizer.__dict__.get(name) or {}).values()) for name in STEP_HOOKS]
    for hook in hooks[0]:
        hook(optimizer, (), {})
    with without_step_hooks(optimizer):
        yield
    for hook in hooks[1]:
        hook(optimizer, (), {})


@contextlib.contextmanager
def only_parameters(optimizer: Optimizer, ids: Collection[int]) -> Iterator[None]:
    """Let the groups of ``optimizer`` have only the parameters with these ids inside."""
    all_parameters = [group["params"] for group in optimizer.param_groups]
    try:
        for group, parameters in zip(optimizer.param_groups, all_parameters, strict=True):
            group["params"] = [p for p in parameters if id(p) in ids]
        yield
    finally:
        for group, parameters in zip(optimizer.param_groups, all_parameters, strict=True):
            group["params"] = parameters
