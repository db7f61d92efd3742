"""Refusal of ``torch.func`` transforms (vmap, grad, jvp) around operations of a step."""

from __future__ import annotations

import torch

from lightning_hybrid.step.tracing.intercept_step_operations import user_line
from lightning_hybrid.step.tracing.recording import StepError


def refuse_transforms(name: str) -> None:
    """Checks that no transform is active around an operation on values of the model.

    Args:
        name: The operation's name.

    Raises:
        StepError: One is active.
    """
    if torch._C._are_functorch_transforms_active():
        raise StepError(
            f"{user_line()}: {name} runs inside a transform of torch.func (vmap, grad, jvp or one made of these), where"
            " values of the model cannot be followed from one operation to the next; apply the transform inside the"
            " forward of one layer, use torch.autograd.grad, or set pipeline_parallel_size=1 and num_microbatches=1"
        )
