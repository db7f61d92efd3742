"""Whether a step on a batch is the mean of that step on its microbatches, and if not, whether it is a weighted one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.verify.one_process.pieces import Piece
from lightning_hybrid.verify.records.compare import as_float64

_Then = Callable[[Any], Any]
# Elements of a gradient that are compared.
_SAMPLES = 256
# Relative differences that come from rounding, by the precision of the loss.
_ROUNDING = {"64-true": 1e-9, "32-true": 1e-5}


@dataclass(frozen=True)
class Mixing:
    """A step whose numbers over a batch are not the mean over its microbatches.

    Attributes:
        what: The loss, or an element of the gradient of a parameter, by its FQN.
        full: Its value over the batch.
        mean: Its mean over the microbatches, each with its share of the samples.
        count: Number of microbatches.
        is_weighted: Whether other weights, which sum to one, make it that of the batch: a mean over the entries that a
            mask selects is such, and a contrastive loss is not, since a handful of weights cannot make all gradients.
    """

    what: str
    full: float
    mean: float
    count: int
    is_weighted: bool

    def __str__(self) -> str:
        """Both numbers in words."""
        what = "" if self.what == "loss" else f" of {self.what}"
        return (
            f"the objective mixes samples: full batch {self.full:.6g}, mean of {self.count} microbatches"
            f" {self.mean:.6g}{what}"
        )


@dataclass
class _Step:
    loss: Tensor
    gradients: list[Tensor]

    @property
    def vector(self) -> Tensor:
        return torch.cat([as_float64(self.loss), *self.gradients])


def mixing_of(
    module: nn.Module, step: Callable[[Piece, _Then], Any], batch: Piece, pieces: Sequence[Piece], precision: str
) -> tuple[Mixing | None, float]:
    """Compare a step on a batch with the mean of that step on its microbatches; None if they are equal.

    Args:
        module: Its parameters are those of the gradients.
        step: Runs the step and returns a function of its loss, a scalar, or None if there is none.
        batch: The batch.
        pieces: Its microbatches.
        precision: Lightning's name of the precision of the loss.

    Returns:
        The result, and the loss over the batch; NaN if it has none.
    """
    named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    steps: list[_Step] = []
    for piece in (batch, *pieces):
        result = step(piece, partial(_gradients, parameters=[parameter for _, parameter in named]))
        if result is None:
            return None, math.nan
        steps.append(result)
    full, each = steps[0].vector, torch.stack([result.vector for result in steps[1:]], dim=1)
    shares = torch.tensor([piece.weight for piece in pieces], dtype=torch.float64)
    shares /= shares.sum()
    rounding = rounding_of(precision)

    def are_equal(vector: Tensor) -> bool:
        loss, gradients = (full - vector).abs()[:1], (full - vector).abs()[1:]
        is_near = bool(loss <= rounding * full[:1].abs())
        return is_near and bool((gradients <= rounding * full[1:].abs().max()).all()) if len(gradients) else is_near

    mean = each @ shares
    if are_equal(mean) or not (torch.isfinite(full).all() and torch.isfinite(each).all()):
        return None, float(full[0])
    weights = torch.linalg.lstsq(each, full.unsqueeze(1), driver="gelsd").solution[:, 0]
    is_weighted = are_equal(each @ weights) and abs(float(weights.sum()) - 1) <= rounding
    what, worst = "loss", 0
    if abs(full[0] - mean[0]) <= rounding * abs(full[0]):
        worst = int((full - mean)[1:].abs().argmax()) + 1
        ends = torch.tensor([len(gradient) for gradient in steps[0].gradients]).cumsum(0)
        what = f"an element of the gradient of {named[int(torch.searchsorted(ends, worst - 1, right=True))][0]}"
    return Mixing(what, float(full[worst]), float(mean[worst]), len(pieces), is_weighted), float(full[0])


def _gradients(loss: Tensor | None, parameters: Sequence[Tensor]) -> _Step | None:
    if loss is None or not loss.requires_grad:
        return None
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    dense = (gradient.to_dense() if gradient.layout != torch.strided else gradient for gradient in gradients)
    return _Step(loss.detach(), [_sampled(as_float64(gradient)) for gradient in dense])


def _sampled(elements: Tensor) -> Tensor:
    """Some elements of a gradient, evenly spaced: a copy of all for each microbatch may not fit."""
    return elements[:: max(1, len(elements) // _SAMPLES)].clone()


def rounding_of(precision: str) -> float:
    """The relative difference of two losses that rounding explains; ``precision`` is Lightning's name of it."""
    return _ROUNDING.get(precision, 1e-2)
