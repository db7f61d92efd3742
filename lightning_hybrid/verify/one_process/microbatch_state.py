"""What the reference does between the parts of a batch: gradients that wait, and what parts leave on a module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_hybrid.pipeline.side_effects.appended_entries import AppendedEntries, Rows, merged
from lightning_hybrid.step.module_state.snapshot import ModuleState


class PartsKept:
    """What the parts of a batch leave on a module: entries of lists are joined, all else counts once per part.

    Where ranks run shares of the batch, it is what the first rank has.
    """

    def __init__(self, module: nn.Module, shares: int) -> None:
        """Args: module: of the replica. shares: ranks that each run some of the parts."""
        # Metrics have the sum over the shares.
        self._metrics = [inner for m in module.modules() if isinstance(m, Metric) for inner in m.modules()]
        self._start = ModuleState(module, without=self._metrics) if shares > 1 else None
        self._end: ModuleState | None = None
        self._module, self._share = module, 0
        self._appended = AppendedEntries(module)
        self._rows: list[Rows] = []
        self._counts = [0]

    def before_part(self, share: int) -> None:
        """A part of a share runs next; each share finds the module as the batch found it."""
        if share != self._share:
            self._leave()
            assert self._start is not None
            self._start.restore()
            self._appended, self._share = AppendedEntries(self._module), share
            self._counts.append(0)

    def after_part(self) -> None:
        """It has run."""
        self._appended.after_microbatch()
        self._counts[-1] += 1

    def _leave(self) -> None:
        self._rows.append(self._appended.rows)
        if self._share == 0:
            self._end = ModuleState(self._module, without=self._metrics)

    def finish(self, weights: Sequence[float], sizes: Sequence[int | None]) -> None:
        """After the last part: args: weights, sizes: of the parts."""
        self._leave()
        assert self._end is not None
        if len(self._rows) > 1:
            self._end.restore()
        self._appended.put(merged(self._rows, self._counts), weights, sizes)


class GradientDeposit:
    """Keeps the gradients of the parts until Lightning has cleared the old ones and calls backward."""

    def __init__(self, module: nn.Module) -> None:
        """Args: module: the user's."""
        self._parameters = list(module.parameters())

    def __enter__(self) -> None:
        """Set aside what is there."""
        self._before = [p.grad for p in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None

    def __exit__(self, *error: object) -> None:
        """Set aside what is new, and show the old."""
        self._new = [p.grad for p in self._parameters]
        for parameter, gradient in zip(self._parameters, self._before, strict=True):
            parameter.grad = gradient

    def loss(self, value: Tensor) -> Tensor:
        """The loss whose backward hands the gradients over."""
        return _HandOver.apply(value.detach().requires_grad_(), self)

    def hand_over(self, factor: Tensor) -> None:
        """Add the new gradients, times a factor, to what is there."""
        for parameter, gradient in zip(self._parameters, self._new, strict=True):
            if gradient is not None:
                gradient = gradient * factor.to(gradient.dtype)
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


class _HandOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, deposit: GradientDeposit) -> Tensor:
        ctx.deposit = deposit
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, None]:
        ctx.deposit.hand_over(gradients[0])
        return None, None
