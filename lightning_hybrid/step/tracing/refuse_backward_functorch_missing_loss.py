"""Refusals of steps without a loss, with ``backward()`` calls, or with ``torch.func`` transforms around operations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.errors import WITHOUT_STAGES, StepError
from lightning_hybrid.step.tracing.intercept_step_operations import user_line


def refuse_transforms(name: str) -> None:
    """Checks that no transform is active around the operation ``name`` on values of the model.

    Raises:
        StepError: One is active.
    """
    if torch._C._are_functorch_transforms_active():
        raise StepError(
            f"{user_line()}: {name} runs inside a transform of torch.func (vmap, grad, jvp or one made of these),"
            " where values of the model cannot be followed from one operation to the next; apply the transform inside"
            " the forward of one layer, or use torch.autograd.grad",
            entry="torch-func",
        )


def no_loss_error(name: str, result: Any) -> StepError:
    """The error for a step that returned ``result`` instead of a loss."""
    what = "a tensor" if isinstance(result, Tensor) else f"a {type(result).__name__}"
    if isinstance(result, Mapping):
        what += f" with keys {list(result)}"
    return StepError(
        f"{name} returned {what} and no loss that depends on a trainable parameter; return the loss tensor, or a dict"
        " with the key 'loss'",
        entry="no-loss",
    )


def check_backward_call(line: str, *, is_replayed: bool) -> None:
    """Refuses a step that calls ``backward()`` itself at ``line``, unless the recording is for inspection only.

    Raises:
        StepError: The recording will be replayed.
    """
    if is_replayed:
        raise StepError(
            f"{line}: the step calls backward() itself, which would run on one stage instead of all; add the term to"
            f" the loss that the step returns, or {WITHOUT_STAGES}",
            entry="own-backward",
        )
