"""Gradient hooks that the user registers on a parameter which tensor or expert ranks shard: they get the full gradient.

These ranks run the same backward in the same order, so each calls the hook with the same tensor, and keeps its shard of
what the hook leaves. Shards of replicas are gathered in a backward already. An expert that one rank has in full has its
gradient there, and the hook runs on that rank alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.parts.shard_and_unshard_parameters import LocalShards

AFTER_ACCUMULATION = "register_post_accumulate_grad_hook"
REGISTRATIONS = frozenset({"register_hook", AFTER_ACCUMULATION})


def on_full_gradient(registration: str, parts: LocalShards, name: str, hook: Any) -> Callable[[Any], Any]:
    """Wraps a hook so that it sees what it would see in a single process, also once the parameter is full again.

    Args:
        registration: Name of the method of ``Tensor`` that registers it.
        parts: Local shards of the module.
        name: FQN of the parameter.
        hook: The user's.
    """
    axes = [(axis, axis.placements[name]) for axis in parts.shardings if name in axis.placements]
    has_owner = any(placement.is_owned for _, placement in axes)
    cuts = [(axis, placement) for axis, placement in axes if not placement.is_owned]

    def full_of(local: Tensor) -> Tensor:
        for axis, placement in reversed(cuts):
            if local.shape[placement.dim] < placement.length:
                local = axis.unshard(local, placement)
        return local

    def shard_of(full: Tensor, like: Tensor) -> Tensor:
        for axis, placement in cuts:
            if full.shape[placement.dim] > like.shape[placement.dim]:
                full = axis.shard(full, placement)
        return full.contiguous()

    def is_elsewhere(local: Tensor) -> bool:
        return has_owner and not local.numel()

    @functools.wraps(hook)
    def of_gradient(gradient: Tensor) -> Tensor | None:
        if is_elsewhere(gradient):
            return None
        full = full_of(gradient)
        version = full._version
        result = hook(full)
        if full is gradient or (result is None and full._version == version):
            return result
        return shard_of(full if result is None else result, gradient)

    @functools.wraps(hook)
    def of_parameter(parameter: nn.Parameter) -> None:
        local, gradient = parameter.data, parameter.grad
        if is_elsewhere(local):
            return
        full = local if gradient is None else full_of(local)
        if full is local:
            hook(parameter)
            return
        before = full.clone()
        parameter.grad, parameter.data = None, full
        parameter.grad = full_of(gradient)
        try:
            hook(parameter)
        finally:
            full, full_gradient = parameter.data, parameter.grad
            parameter.grad, parameter.data = None, local
        with torch.no_grad():
            if not torch.equal(full, before):
                local.copy_(shard_of(full, local))
            if full_gradient is not None:  # in the memory of the gradient, which may be that of a reduction
                gradient.copy_(shard_of(full_gradient, gradient))
                parameter.grad = gradient

    return of_parameter if registration == AFTER_ACCUMULATION else of_gradient
