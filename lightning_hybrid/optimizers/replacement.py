"""Replacement of an optimizer's ``step`` for a while."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_hybrid.patching import replace, wraps

STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")  # attributes of an optimizer


def call_step_hooks(optimizer: Optimizer, hooks: Any) -> None:
    """Call the hooks of one of ``STEP_HOOKS``, where a step of many calls has taken them off the optimizer."""
    for hook in list((hooks or {}).values()):
        hook(optimizer, (), {})


def replace_step(optimizer: Optimizer, step: Callable[..., Any], *, reason: str) -> Callable[[], None]:
    """Replace the step of one optimizer by a function that is called like the method; return the undo.

    The new step has the attributes that learning rate schedulers have set on the old one.
    """

    @wraps(optimizer.step)
    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._opt_called = True  # as the scheduler's own wrapper notes, which is replaced
        return step(self, *args, **kwargs)

    return replace(optimizer, "step", MethodType(counted, optimizer), reason=reason)


def step_after_closure(
    optimizer: Optimizer, step: Callable[[dict[str, Any]], None], *, reason: str
) -> Callable[[], None]:
    """Replace the step by one that begins after the closure, with the other arguments of the call; return the undo."""

    def run(_: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        step(kwargs)
        return loss

    return replace_step(optimizer, run, reason=reason)
