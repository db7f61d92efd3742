"""The handoff of gradients to Lightning when it calls backward.

A pipeline has run forward and backward when ``training_step`` returns, but Lightning then calls ``zero_grad`` and only
afterwards ``backward(loss)``. So the new gradients are stored, and the returned loss has an autograd function that adds
them to ``.grad`` when its backward runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn


class GradientHandoff:
    """The gradients of one step, stored until Lightning's backward."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        zeroed_before_backward: bool,
        expected_seed: float,
        shown: bool = True,
        can_roll_back: bool = False,
        summed_later: Mapping[nn.Parameter, int] | None = None,
    ) -> None:
        """Begin a step.

        Args:
            parameters: The parameters that this rank trains.
            zeroed_before_backward: Whether ``zero_grad`` comes between the step and its backward.
            expected_seed: The gradient of the loss from which the step's backward started; Lightning's must equal it.
            shown: Whether user code may read the old gradients before they are cleared; otherwise their memory is
                freed before the step needs it.
            can_roll_back: Whether the step may be rolled back, which restores the gradients of earlier batches.
            summed_later: Parameters whose gradients are summed over several ranks after a later batch, with the number
                of ranks. Their sum of an earlier step, where ``zero_grad`` keeps it, is divided by that number.
        """
        self._parameters = parameters
        self._summed_later = summed_later or {}
        self._zeroed_later = zeroed_before_backward
        self._seeded = expected_seed
        self._before: list[Tensor | None] = []
        self._new: list[Tensor | None] = []
        if zeroed_before_backward:
            # Copies: the reducer writes this step's averages into the buffers of the step before.
            grads = [parameter.grad for parameter in parameters]
            self._before = [grad.clone() if shown and grad is not None else None for grad in grads]
            for parameter in parameters:
                parameter.grad = None
        elif can_roll_back:
            self._before = [None if parameter.grad is None else parameter.grad.clone() for parameter in parameters]

    def undo(self) -> None:
        """Roll back the step: restore the gradients of earlier batches, if it may have changed them."""
        if self._before:
            for parameter, gradient in zip(self._parameters, self._before, strict=True):
                parameter.grad = gradient
        self._before = []

    def wrap(self, loss: Tensor) -> Tensor:
        """End the step: restore the old gradients, and return a scalar loss whose backward deposits the new ones."""
        if self._zeroed_later:
            self._new = [parameter.grad for parameter in self._parameters]
            for parameter, grad in zip(self._parameters, self._before, strict=True):
                parameter.grad = grad
            self._before = []
        anchor = torch.zeros((), dtype=loss.dtype, device=loss.device, requires_grad=True)
        return _HandoffFunction.apply(loss, anchor, self)

    def deposit(self, incoming: Tensor) -> None:
        """Add the gradients to ``.grad``, scaled by the incoming gradient of the loss, a scalar, over the expected one.

        Raises:
            RuntimeError: Gradients of earlier batches are added already, and the factor is not 1.
        """
        factor = float(incoming) / self._seeded
        exact = abs(factor - 1.0) < 1e-6
        if not self._zeroed_later:
            if not exact:
                raise RuntimeError(
                    f"the loss was scaled by {float(incoming)} before its backward where {self._seeded} was expected;"
                    " with accumulate_grad_batches and pipeline stages scale it inside training_step"
                )
            return
        for parameter, num_ranks in self._summed_later.items():
            if parameter.grad is not None:
                parameter.grad = parameter.grad / num_ranks
        for parameter, grad in zip(self._parameters, self._new, strict=True):
            if grad is not None:
                if not exact:
                    grad = grad * factor
                parameter.grad = grad if parameter.grad is None else parameter.grad + grad
        self._new = []


class _HandoffFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, loss: Tensor, anchor: Tensor, owner: GradientHandoff
    ) -> Tensor:
        """Return the scalar loss, which depends on the scalar ``anchor`` too."""
        del anchor
        ctx.owner = owner  # type: ignore[attr-defined]
        return loss.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *incoming: Tensor) -> tuple[None, Tensor, None]:
        """Deposit the gradients; a scalar zero is that of ``anchor``."""
        ctx.owner.deposit(incoming[0])  # type: ignore[attr-defined]
        return None, torch.zeros_like(incoming[0]), None
