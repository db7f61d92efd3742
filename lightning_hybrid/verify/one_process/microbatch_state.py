"""State that the reference carries between microbatches: deferred gradients, and side effects on the module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_hybrid.pipeline.side_effects.join_appended_entries import AppendedEntries, Rows, merged
from lightning_hybrid.step.module_state.snapshot import ModuleSnapshot


class MicrobatchSideEffects:
    """Side effects of microbatches on a module: list entries are joined, all others happen once per microbatch.

    Where ranks run shares of the batch, the module ends in the state of the first rank.
    """

    def __init__(self, module: nn.Module, shares: int) -> None:
        # Metrics accumulate over all shares.
        self._metrics = [inner for m in module.modules() if isinstance(m, Metric) for inner in m.modules()]
        self._start = ModuleSnapshot(module, without=self._metrics) if shares > 1 else None
        self._end: ModuleSnapshot | None = None
        self._module, self._share = module, 0
        self._appended = AppendedEntries(module)
        self._rows: list[Rows] = []
        self._counts = [0]

    def before_microbatch(self, share: int) -> None:
        """Prepare for a microbatch of a share; each share starts from the module's state before the batch."""
        if share != self._share:
            self._leave()
            assert self._start is not None
            self._start.restore()
            self._appended, self._share = AppendedEntries(self._module), share
            self._counts.append(0)

    def after_microbatch(self) -> None:
        """Record the side effects of the microbatch that has run."""
        self._appended.after_microbatch()
        self._counts[-1] += 1

    def _leave(self) -> None:
        self._rows.append(self._appended.rows)
        if self._share == 0:
            self._end = ModuleSnapshot(self._module, without=self._metrics)

    def finish(self, weights: Sequence[float], sizes: Sequence[int | None]) -> None:
        """Merge after the last microbatch; args: weights, sizes: one per microbatch."""
        self._leave()
        assert self._end is not None
        if len(self._rows) > 1:
            self._end.restore()
        self._appended.put(merged(self._rows, self._counts), weights, sizes)


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

    def loss(self, value: Tensor) -> Tensor:
        """Make a loss, equal to ``value``, whose backward adds the new gradients to ``.grad``."""
        return _AddGradients.apply(value.detach().requires_grad_(), self)

    def add_gradients(self, factor: Tensor) -> None:
        """Add the new gradients, times a factor, to the existing ones."""
        for parameter, gradient in zip(self._parameters, self._new, strict=True):
            if gradient is not None:
                gradient = gradient * factor.to(gradient.dtype)
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


class _AddGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: DeferredGradients) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, None]:
        ctx.gradients.add_gradients(gradients[0])
        return None, None
