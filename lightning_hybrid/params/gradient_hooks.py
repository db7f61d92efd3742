"""Gradient hooks that the user registers on a parameter which tensor or expert ranks shard: they get the full gradient.

These ranks run the same backward in the same order, so each calls the hook with the same tensor, and keeps its shard of
what the hook leaves. Shards of replicas are gathered in a backward already. An expert that one rank has in full has its
gradient there, and the hook runs on that rank alone.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_hybrid.params import store
from lightning_hybrid.params.guards import unguarded
from lightning_hybrid.params.shards import LocalShards
from lightning_hybrid.patching import around
from lightning_hybrid.step.objects.modules import modules_in, parameters_of

AFTER_ACCUMULATION = "register_post_accumulate_grad_hook"
REGISTRATIONS = frozenset({"register_hook", AFTER_ACCUMULATION})


def on_full_gradient(registration: str, parts: LocalShards, name: str, hook: Any) -> Callable[[Any], Any]:
    """Wraps a hook so that it sees what it would see in a single process, also once the parameter is full again.

    ``registration`` names the method of ``Tensor`` that registers it.
    """
    cuts = _Cuts(parts, name)

    @functools.wraps(hook)
    def of_gradient(gradient: Tensor) -> Tensor | None:
        if cuts.is_elsewhere(gradient):
            return None
        full = cuts.full(gradient)
        version = full._version
        result = hook(full)
        if full is gradient or (result is None and full._version == version):
            return result
        return cuts.shard_of(full if result is None else result, gradient)

    @functools.wraps(hook)
    def of_parameter(parameter: nn.Parameter) -> None:
        with unguarded(parameter):
            _call_on_full_parameter(cuts, parameter, hook)

    return of_parameter if registration == AFTER_ACCUMULATION else of_gradient


class _Cuts:
    """The shards of one parameter that are left in a backward."""

    def __init__(self, parts: LocalShards, name: str) -> None:
        axes = [(axis, axis.placements[name]) for axis in parts.shardings if name in axis.placements]
        self._axes = [(axis, placement) for axis, placement in axes if not placement.is_owned]
        self._has_owner = len(self._axes) < len(axes)

    def is_elsewhere(self, local: Tensor) -> bool:
        """Returns whether another rank has the parameter that this tensor is of."""
        return self._has_owner and not local.numel()

    def full(self, local: Tensor) -> Tensor:
        """Returns the full tensor of a shard; of a tensor that is full, the same; collective."""
        for axis, placement in reversed(self._axes):
            if local.shape[placement.dim] < placement.length:
                local = axis.unshard(local, placement)
        return local

    def shard_of(self, full: Tensor, like: Tensor) -> Tensor:
        """Returns the shard of a full tensor, of the shape of ``like``."""
        for axis, placement in self._axes:
            if full.shape[placement.dim] > like.shape[placement.dim]:
                full = axis.shard(full, placement)
        return full.contiguous()


def _call_on_full_parameter(cuts: _Cuts, parameter: nn.Parameter, hook: Callable[[nn.Parameter], None]) -> None:
    local, gradient = parameter.data, parameter.grad
    if cuts.is_elsewhere(local):
        return
    full = local if gradient is None else cuts.full(local)
    if gradient is None or full is local:
        hook(parameter)
        return
    before = full.clone()
    store.swap_in(parameter, full, cuts.full(gradient))
    try:
        hook(parameter)
    finally:
        full, full_gradient = parameter.data, parameter.grad
        store.swap_out(parameter, local, None)
    with torch.no_grad():
        if not torch.equal(full, before):
            local.copy_(cuts.shard_of(full, local))
        if full_gradient is not None:  # in the memory of the gradient, which may be that of a reduction
            gradient.copy_(cuts.shard_of(full_gradient, gradient))
            parameter.grad = gradient


class StepHooks:
    """The hooks that one step registers itself, on parameters: once, as in one process; until ``close``.

    A step runs once per microbatch and stage of a rank, and each run may register the hooks of the step again. The last
    one stays: it is the one whose handle the user's code has kept, unless it keeps all of them.
    """

    def __init__(self, root: nn.Module) -> None:
        self._parameters = {id(parameter) for _, parameter in parameters_of(modules_in(root))}
        self._kept: dict[tuple[int, str, int], RemovableHandle] = {}  # by parameter, kind, and number in a run
        self._counts: Counter[tuple[int, str]] | None = None  # of the present run
        self._undo = [
            around(torch.Tensor, name, self._registration(name), reason="a step registers each hook once")
            for name in REGISTRATIONS
        ]

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        """Run the step inside, on a part of its batch or for one stage."""
        before, self._counts = self._counts, Counter()
        try:
            yield
        finally:
            self._counts = before

    def _registration(self, name: str) -> Callable[..., Any]:
        def register(original: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
            counts = self._counts
            if counts is None or id(tensor) not in self._parameters:
                return original(tensor, *args, **kwargs)
            self._counts = None  # a function mode may call this again
            try:
                handle = original(tensor, *args, **kwargs)
            finally:
                self._counts = counts
            key = id(tensor), name, counts[id(tensor), name]
            counts[id(tensor), name] += 1
            if key in self._kept:
                self._kept[key].remove()
            self._kept[key] = handle
            return handle

        return register

    def remove(self) -> None:
        """Remove the hooks of the step, which is undone."""
        for handle in self._kept.values():
            handle.remove()
        self._kept.clear()

    def close(self) -> None:
        """Let steps register hooks without this object."""
        while self._undo:
            self._undo.pop()()


@contextlib.contextmanager
def without_registrations(root: nn.Module) -> Iterator[None]:
    """Run steps inside that are undone: hooks that they register on parameters are removed at the end."""
    hooks = StepHooks(root)
    try:
        with hooks.run():
            yield
    finally:
        hooks.close()
        hooks.remove()
