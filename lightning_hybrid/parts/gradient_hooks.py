"""Gradient hooks that the user registers on a parameter which tensor ranks shard: they get the full gradient.

Those of the strategy itself get what this rank holds.

All tensor ranks run the same backward in the same order, so each calls the hook with the same tensor, and keeps its
shard of what the hook leaves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.parts.parameter_shard_placement import Shard
from lightning_hybrid.parts.shard_and_unshard_parameters import AxisSharding

AFTER_ACCUMULATION = "register_post_accumulate_grad_hook"
REGISTRATIONS = frozenset({"register_hook", AFTER_ACCUMULATION})


def hook_accumulated(parameter: Tensor, hook: Callable[[Tensor], None]) -> torch.utils.hooks.RemovableHandle:
    """Registers a hook of the strategy, which gets the parameter, of any shape, as this rank holds it: nothing is sent.

    It is registered while a step runs, say, in modes that take the hooks registered in them for the user's.
    """
    with torch._C.DisableTorchFunction():
        return parameter.register_post_accumulate_grad_hook(hook)


def on_full_gradient(registration: str, axis: AxisSharding, placement: Shard, hook: Any) -> Callable[[Any], Any]:
    """Wraps a hook so that it sees what it would see in a single process, also once the parameter is full again.

    Args:
        registration: Name of the method of ``Tensor`` that registers it.
        axis: The tensor ranks.
        placement: Of the parameter.
        hook: The user's.
    """

    @functools.wraps(hook)
    def of_gradient(gradient: Tensor) -> Tensor | None:
        if gradient.shape[placement.dim] == placement.length:
            return hook(gradient)
        full = axis.unshard(gradient, placement)
        version = full._version
        result = hook(full)
        if result is None and full._version == version:
            return None
        return axis.shard(full if result is None else result, placement).contiguous()

    @functools.wraps(hook)
    def of_parameter(parameter: nn.Parameter) -> None:
        local, gradient = parameter.data, parameter.grad
        if gradient is None or local.shape[placement.dim] == placement.length:
            hook(parameter)
            return
        full = axis.unshard(local, placement)
        before = full.clone()
        parameter.grad, parameter.data = None, full
        parameter.grad = axis.unshard(gradient, placement)
        try:
            hook(parameter)
        finally:
            full, full_gradient = parameter.data, parameter.grad
            parameter.grad, parameter.data = None, local
        with torch.no_grad():
            if not torch.equal(full, before):
                local.copy_(axis.shard(full, placement))
            if full_gradient is not None:  # in the memory of the gradient, which may be that of a reduction
                gradient.copy_(axis.shard(full_gradient, placement))
                parameter.grad = gradient

    return of_parameter if registration == AFTER_ACCUMULATION else of_gradient
