"""Fused steps of torch's Adam and AdamW on the host.

On a host torch steps one parameter after the other and reads its numbers about ten times; its fused kernel reads them
once. It computes the same in another order of rounding. Torch itself does not choose it by default; it is chosen here
where the user has left the choice to torch.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Adam, AdamW, Optimizer
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lightning_hybrid.optimizers.replacement import Place, is_replaced, replace_step
from lightning_hybrid.optimizers.state_file import HOST
from lightning_hybrid.params.guards import can_guard

_STATES = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


def fuse_steps(optimizers: Iterable[Optimizer], until: contextlib.ExitStack) -> None:
    """Fuse host steps of torch's Adam and AdamW where that changes nothing but rounding, until ``until`` is closed."""
    for optimizer in optimizers:
        if is_replaced(optimizer):  # fused already, within a step in float32
            continue
        if type(optimizer) in (Adam, AdamW) and inspect.unwrap(optimizer.step) is inspect.unwrap(Adam.step):
            until.callback(_fuse(optimizer))


def _fuse(optimizer: Optimizer) -> Callable[[], None]:
    original = optimizer.step

    def step(_: Optimizer, closure: Any = None, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as fused:

            def begin() -> Any:
                loss = None if closure is None else closure()
                fused.enter_context(_fused(optimizer))
                return loss

            first = optimizer.register_step_post_hook(lambda *_: fused.close())
            optimizer._optimizer_step_post_hooks.move_to_end(first.id, last=False)  # type: ignore[attr-defined]
            try:
                return original(closure=begin, **kwargs)
            finally:
                first.remove()

    return replace_step(optimizer, step, Place.FUSED, reason="fused steps on the host")


@contextlib.contextmanager
def _fused(optimizer: Optimizer) -> Iterator[None]:
    """Set ``fused`` only while the parameters are stepped: hooks and checkpoints see the user's own choice."""
    # A mode may give the step other tensors than the local ones; a step in the backward runs in a mode of the pipeline.
    modes = [*_get_current_dispatch_mode_stack(), *_get_current_function_mode_stack()]
    is_seen = not all(getattr(mode, "only_watches", False) for mode in modes)
    chosen = [] if is_seen else [group for group in optimizer.param_groups if _can_be_fused(group, optimizer.state)]
    for group in chosen:
        group["fused"] = True
    try:
        yield
    finally:
        for group in chosen:
            group["fused"] = None
            increment_version([tensor for p in _stepped(group) for tensor in _written(p, optimizer.state[p])])


def _can_be_fused(group: dict[str, Any], state: dict[Any, Any]) -> bool:
    if group["fused"] is not None or group["foreach"] is not None or group["capturable"] or group["differentiable"]:
        return False
    numbers = group["lr"], *group["betas"], group["eps"], group["weight_decay"]
    if not all(isinstance(number, int | float) for number in numbers):  # others are rounded in their own way
        return False
    stepped = _stepped(group)
    return bool(stepped) and all(_is_plain(p, state.get(p, {})) for p in stepped)


def _stepped(group: dict[str, Any]) -> list[Tensor]:
    return [p for p in group["params"] if p.grad is not None]


def _written(parameter: Tensor, state: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that the kernel writes without marking them for autograd."""
    return [parameter, *(state[name] for name in _STATES if name in state)]


def _is_plain(parameter: Tensor, state: dict[str, Any]) -> bool:
    """Whether the kernel, which knows no shapes and strides, can step a parameter; not before its first step."""
    return (
        can_guard(parameter)  # a guarded one is stepped in the backward, below its guard
        and parameter.device == HOST
        and parameter.dtype in (torch.float32, torch.float64)
        and "step" in state
        and _has_same_layout(parameter.grad, parameter)
        and parameter.is_contiguous()
        and all(_has_same_layout(state[name], parameter) for name in _STATES if name in state)
    )


def _has_same_layout(tensor: Any, parameter: Tensor) -> bool:
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.shape == parameter.shape
        and tensor.dtype is parameter.dtype
        and tensor.device == parameter.device
        and tensor.is_contiguous()
    )
