"""Gradients of the pieces of a step, kept beside those that the parameters have."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class PieceGradients:
    """Adds the gradients of pieces inside its context; the parameters have their earlier ones again afterwards."""

    def __init__(self, module: nn.Module) -> None:
        self._named = list(module.named_parameters())

    def __enter__(self) -> None:
        """Set the existing gradients aside."""
        self._before = self._replaced([None] * len(self._named))

    def __exit__(self, *error: object) -> None:
        """Set the new gradients aside, and restore the old ones."""
        self._new = self._replaced(self._before)

    def _replaced(self, gradients: list[Tensor | None]) -> list[Tensor | None]:
        before = [parameter.grad for _, parameter in self._named]
        for (_, parameter), gradient in zip(self._named, gradients, strict=True):
            parameter.grad = gradient
        return before

    def backward(self, loss: Tensor, weight: float, seed: float = 1.0) -> None:
        """Add the gradients of a scalar loss, times its weight: what a backward adds by itself is weighted too."""
        so_far = self._replaced([None] * len(self._named))
        loss.backward(torch.full_like(loss, seed))
        for (_, parameter), before in zip(self._named, so_far, strict=True):
            if parameter.grad is None:
                parameter.grad = before
            else:
                gradient = parameter.grad * weight
                parameter.grad = gradient if before is None else before + gradient

    def loss(self, value: Tensor) -> Tensor:
        """Make a scalar loss, equal to the scalar ``value``, whose backward adds the new gradients to ``.grad``."""
        return _AddGradients.apply(value.detach().requires_grad_(), self)

    def add_to_parameters(self, factor: Tensor) -> None:
        """Add the new gradients, times ``factor``, a scalar, to the existing ones in ``.grad``."""
        for (_, parameter), gradient in zip(self._named, self._new, strict=True):
            if gradient is not None:
                gradient = gradient * factor.to(gradient.dtype)
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def add_to(self, sums: dict[str, Tensor]) -> None:
        """Add the new gradients to these of the same shapes, by FQN, on the CPU."""
        for (name, _), gradient in zip(self._named, self._new, strict=True):
            if gradient is not None:
                gradient = gradient.detach().to("cpu")
                gradient = gradient.to_dense() if gradient.layout != torch.strided else gradient
                sums[name] = sums[name] + gradient if name in sums else gradient


class _AddGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: PieceGradients) -> Tensor:
        """Returns a copy of the scalar loss."""
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, None]:
        ctx.gradients.add_to_parameters(gradients[0])
        return None, None
