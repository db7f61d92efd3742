"""Let an optimizer's ``step`` be another function for a while."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_hybrid.patching import replace


def replace_step(optimizer: Optimizer, step: Callable[..., Any]) -> Callable[[], None]:
    """Replace the step of one optimizer; schedulers find on it what they found on the one before.

    Args:
        optimizer: Of the run.
        step: Called like the method.

    Returns:
        Undoes it.
    """
    return replace(optimizer, "step", MethodType(functools.wraps(optimizer.step)(step), optimizer))


def step_after_closure(optimizer: Optimizer, step: Callable[[dict[str, Any]], None]) -> Callable[[], None]:
    """Replace the step of one optimizer by one that begins when the closure, if there is one, has run.

    Args:
        optimizer: Of the run.
        step: Called with what its ``step`` is called with besides a closure.

    Returns:
        Undoes it.
    """

    def run(_: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        step(kwargs)
        return loss

    return replace_step(optimizer, run)
