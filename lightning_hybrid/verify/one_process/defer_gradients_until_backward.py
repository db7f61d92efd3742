"""Gradients of the microbatches, set aside until Lightning calls backward on the loss of the step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class DeferredGradients:
    """Keeps the gradients of the microbatches until Lightning has cleared the old ones and calls backward."""

    def __init__(self, module: nn.Module) -> None:
        self._parameters = list(module.parameters())

    def __enter__(self) -> None:
        """Set the existing gradients aside."""
        self._before = [p.grad for p in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None

    def __exit__(self, *error: object) -> None:
        """Set the new gradients aside, and restore the old ones."""
        self._new = [p.grad for p in self._parameters]
        for parameter, gradient in zip(self._parameters, self._before, strict=True):
            parameter.grad = gradient

    def backward(self, loss: Tensor, weight: float) -> None:
        """Add the gradients of a scalar loss, times its weight: what a backward adds by itself is weighted too."""
        so_far = [p.grad for p in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        loss.backward()
        for parameter, before in zip(self._parameters, so_far, strict=True):
            if parameter.grad is None:
                parameter.grad = before
            else:
                gradient = parameter.grad * weight
                parameter.grad = gradient if before is None else before + gradient

    def loss(self, value: Tensor) -> Tensor:
        """Make a scalar loss, equal to the scalar ``value``, whose backward adds the new gradients to ``.grad``."""
        return _AddGradients.apply(value.detach().requires_grad_(), self)

    def add_gradients(self, factor: Tensor) -> None:
        """Add the new gradients, times ``factor``, a scalar, to the existing ones in ``.grad``."""
        for parameter, gradient in zip(self._parameters, self._new, strict=True):
            if gradient is not None:
                gradient = gradient * factor.to(gradient.dtype)
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


class _AddGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: DeferredGradients) -> Tensor:
        """Returns a copy of the scalar loss."""
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, None]:
        ctx.gradients.add_gradients(gradients[0])
        return None, None
