"""The base class of optimizers whose step of a parameter is scaled by a ratio of two norms over all of its elements.

    each parameter     updates its states, and adds up squares of its elements and of its update
    all parameters     one sum over the ranks that hold shards of them: two numbers per parameter
    each parameter     is stepped

All other arithmetic is elementwise, so a rank needs its own shards, and states of these, only. In one process nothing
is summed.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

# Replaced on an optimizer whose parameters are sharded.
SHARD_METHODS = ("counted_slices", "sum_over_shards")


class TrustRatioOptimizer(Optimizer):
    """Steps each parameter by an elementwise update, scaled by a function of two norms over the full parameter."""

    @abstractmethod
    def update_states(self, p: Tensor, group: dict[str, Any]) -> None:
        """Update the states of a parameter of any shape that has a gradient, before any parameter is stepped."""

    @abstractmethod
    def normed(self, p: Tensor, group: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """The two tensors, of the shape of the parameter, whose norms give its trust ratio."""

    @abstractmethod
    def step_parameter(self, p: Tensor, group: dict[str, Any], norms: tuple[Tensor, Tensor]) -> None:
        """Step a parameter of any shape by two norms over the full parameter, both scalars."""

    def counted_slices(self, p: Tensor, local: Tensor) -> list[Tensor]:
        """The slices, of any shapes, of a tensor of the parameter's shape whose squares this rank adds up."""
        return [local]

    def sum_over_shards(self, squares: Tensor) -> Tensor:
        """The sum of a float64 tensor of shape (parameters, 2) over the ranks that hold shards, of the same shape."""
        return squares

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have gradients.

        Args:
            closure: Computes gradients, and returns the loss.

        Returns:
            What the closure returns; None without one.

        Raises:
            RuntimeError: A gradient is sparse, or a parameter complex.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # All of them: ranks add up the same rows, also where one has no gradient.
        members = [(p, group) for group in self.param_groups for p in group["params"]]
        rows = []
        for p, group in members:
            if p.grad is None:
                rows.append(torch.zeros(2, dtype=torch.float64))
                continue
            self._check(p)
            self.update_states(p, group)
            rows.append(self._squares(p, self.normed(p, group)))
        if not rows:
            return loss
        device = next((p.device for p, _ in members if p.grad is not None), torch.device("cpu"))
        norms = self.sum_over_shards(torch.stack([row.to(device) for row in rows])).sqrt()
        for (p, group), row in zip(members, norms, strict=True):
            if p.grad is not None:
                first, second = row.to(p.device, _real_dtype(p)).unbind()
                self.step_parameter(p, group, (first, second))
        return loss

    def _squares(self, p: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        """Sums of squares of the counted slices of two tensors, of shape (2,) and in float64."""
        totals = []
        for tensor in tensors:
            slices = [s for s in self.counted_slices(p, tensor) if s.numel()]
            norms = [torch.linalg.vector_norm(s, dtype=_real_dtype(p)).double().square() for s in slices]
            totals.append(torch.stack(norms).sum() if norms else torch.zeros((), dtype=torch.float64, device=p.device))
        return torch.stack(totals)

    def _check(self, p: Tensor) -> None:
        assert p.grad is not None
        if p.grad.is_sparse or p.is_complex():
            what = "a sparse gradient" if p.grad.is_sparse else "complex elements"
            raise RuntimeError(
                f"{type(self).__name__} does not support a parameter with {what}, shape {tuple(p.shape)}"
            )


def check_range(name: str, value: Any, low: float, high: float = float("inf")) -> None:
    """Check ``low <= value < high`` for an option of an optimizer.

    Raises:
        ValueError: It is outside.
    """
    if not low <= value < high:
        raise ValueError(f"{name}={value} is outside of [{low}, {high})")


def _real_dtype(p: Tensor) -> torch.dtype:
    """At least float32, in which norms of half-precision parameters are computed."""
    return torch.promote_types(p.dtype, torch.float32)
