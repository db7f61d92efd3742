"""Steps of torch's Adam and AdamW on the host by torch's fused kernel.

On a host torch steps one parameter after the other and goes over its numbers about ten times; its fused kernel goes
over them once. It computes the same in another order of rounding. Torch itself does not choose it unasked; it is chosen
here where the user has left the choice to torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from lightning_hybrid.zero.homes import HOST
from lightning_hybrid.zero.replaced_step import replace_step

_STATES = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


def fuse_steps(optimizers: Iterable[Optimizer], until: contextlib.ExitStack) -> None:
    """Let steps on the host be fused where that changes nothing but rounding.

    Args:
        optimizers: Of the run; those that are no Adam or AdamW of torch's stay as they are.
        until: Undoes it when it is closed.
    """
    for optimizer in optimizers:
        if type(optimizer) in (Adam, AdamW):
            until.callback(_fuse(optimizer))


def _fuse(optimizer: Optimizer) -> Any:
    original = optimizer.step

    def step(_: Optimizer, closure: Any = None, **kwargs: Any) -> Any:
        if closure is None:
            with _fused(optimizer):
                return original(**kwargs)
        with contextlib.ExitStack() as fused:

            def run() -> Any:
                loss = closure()
                fused.enter_context(_fused(optimizer))
                return loss

            return original(closure=run, **kwargs)

    return replace_step(optimizer, step)


@contextlib.contextmanager
def _fused(optimizer: Optimizer) -> Iterator[None]:
    """Only while the parameters are stepped: checkpoints hold the user's own choice."""
    chosen = [group for group in optimizer.param_groups if _can_be_fused(group, optimizer.state)]
    for group in chosen:
        group["fused"] = True
    try:
        yield
    finally:
        for group in chosen:
            group["fused"] = None


def _can_be_fused(group: dict[str, Any], state: dict[Any, Any]) -> bool:
    if group["fused"] is not None or group["foreach"] is not None or group["capturable"] or group["differentiable"]:
        return False
    if any(isinstance(number, Tensor) for number in (group["lr"], *group["betas"])):
        return False
    stepped = [p for p in group["params"] if p.grad is not None]
    return bool(stepped) and all(_is_plain(p, state.get(p, {})) for p in stepped)


def _is_plain(parameter: Tensor, state: dict[str, Any]) -> bool:
    """Whether the kernel, which knows no strides, can take a parameter as it lies; not before it has been stepped."""
    return (
        type(parameter) is nn.Parameter
        and parameter.device == HOST
        and parameter.dtype in (torch.float32, torch.float64)
        and "step" in state
        and _lies_like(parameter.grad, parameter)
        and parameter.is_contiguous()
        and all(_lies_like(state[name], parameter) for name in _STATES if name in state)
    )


def _lies_like(tensor: Any, parameter: Tensor) -> bool:
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.dtype is parameter.dtype
        and tensor.device == parameter.device
        and tensor.is_contiguous()
    )
