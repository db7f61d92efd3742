"""A step on pieces of a batch: draws and statistics by microbatch, gradients by piece, and whether it mixes samples."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_hybrid.patching import around
from lightning_hybrid.randomness.keyed import KeyedRandomness
from lightning_hybrid.step.tracing.instrument import draw_as_stages
from lightning_hybrid.text import contrasted
from lightning_hybrid.verify.compare import as_float64
from lightning_hybrid.verify.data import Piece

# Elements of a gradient that are compared: a copy of all for each microbatch may not fit.
_SAMPLES = 256
# Relative differences that come from rounding, by the precision of the loss.
_ROUNDING = {"64-true": 1e-9, "32-true": 1e-5}


# -- rows of microbatches ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def rows_of_pieces(
    module: nn.Module,
    randomness: KeyedRandomness | None,
    number: int,
    pieces: Sequence[Piece],
    *,
    batch_norm: bool = True,
) -> Iterator[None]:
    """Context of a step on the samples of these pieces, of one replica each, one after the other.

    Without ``randomness`` the generators are left alone; ``batch_norm`` takes statistics per microbatch.
    """
    sizes = [piece.sizes for piece in pieces] if all(piece.sizes for piece in pieces) else []
    flat = [size for each in sizes for size in each]
    numbers = [each for piece in pieces for each in piece.numbers] if len(flat) > 1 else []
    with contextlib.ExitStack() as stack:
        if randomness is not None:
            stack.enter_context(draw_as_stages(module, randomness, number, pieces[0].number))
            stack.enter_context(randomness.rows_of_microbatches(number, numbers, flat if numbers else []))
        for layer in module.modules() if batch_norm and len(flat) > 1 else ():
            if isinstance(layer, _BatchNorm):
                stack.callback(around(layer, "forward", partial(_in_chunks, layer, sizes), reason="the reference"))
        yield


def has_batch_norm(module: nn.Module) -> bool:
    """Whether a module has a BatchNorm of torch."""
    return any(isinstance(layer, _BatchNorm) for layer in module.modules())


def _in_chunks(
    layer: nn.Module, sizes: Sequence[Sequence[int]], original: Callable[[Tensor], Tensor], rows: Tensor
) -> Tensor:
    """Normalise ``rows`` of shape (samples * k, ...), where each microbatch has its samples' k rows.

    Running statistics are those of the first replica, as under DDP.
    """
    per_sample, rest = divmod(len(rows), sum(map(sum, sizes)))
    if not layer.training or rest:
        return original(rows)
    chunks = iter(rows.split([size * per_sample for own in sizes for size in own]))
    outputs = [original(next(chunks)) for _ in sizes[0]]
    after = [buffer.clone() for buffer in layer.buffers()]
    outputs += [original(chunk) for chunk in chunks]
    for buffer, value in zip(layer.buffers(), after, strict=True):
        buffer.data.copy_(value)  # not a write that autograd sees
    return torch.cat(outputs)


# -- gradients of pieces -----------------------------------------------------------------------------------------------


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

    def _replaced(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        before = [parameter.grad for _, parameter in self._named]
        for (_, parameter), gradient in zip(self._named, gradients, strict=True):
            parameter.grad = gradient
        return before

    def backward(self, loss: Tensor, weight: float, seed: float = 1.0) -> None:
        """Add the gradients of a scalar loss, times its weight: what a backward adds by itself is weighted too."""
        so_far = self._replaced([None] * len(self._named))
        loss.backward(torch.full_like(loss, seed))
        self._replaced(_sums(so_far, [p.grad if p.grad is None else p.grad * weight for _, p in self._named]))

    def loss(self, value: Tensor) -> Tensor:
        """Make a scalar loss, equal to the scalar ``value``, whose backward adds the new gradients to ``.grad``."""
        return _AddGradients.apply(value.detach().requires_grad_(), self)

    def add_to_parameters(self, factor: Tensor) -> None:
        """Add the new gradients, times ``factor``, a scalar, to the existing ones in ``.grad``."""
        new = [gradient if gradient is None else gradient * factor.to(gradient.dtype) for gradient in self._new]
        self._replaced(_sums([parameter.grad for _, parameter in self._named], new))

    def add_to(self, sums: dict[str, Tensor]) -> None:
        """Add the new gradients to these of the same shapes, by FQN, on the CPU."""
        for (name, _), gradient in zip(self._named, self._new, strict=True):
            if gradient is not None:
                gradient = gradient.detach().to("cpu")
                gradient = gradient.to_dense() if gradient.layout != torch.strided else gradient
                sums[name] = sums[name] + gradient if name in sums else gradient


def _sums(some: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [b if a is None else a if b is None else a + b for a, b in zip(some, others, strict=True)]


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


# -- objectives that mix samples ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mixing:
    """A step whose numbers over a batch are not the mean over its microbatches."""

    what: str  # the loss, or an element of the gradient of a parameter, by its FQN
    full: float  # its value over the batch
    mean: float  # its mean over the microbatches, each with its share of the samples
    count: int  # number of microbatches
    # whether other weights, which sum to one, make it that of the batch: a mean over the entries that a mask selects is
    # such, and a contrastive loss is not, since a handful of weights cannot make all gradients
    is_weighted: bool

    def __str__(self) -> str:
        """Both numbers in words."""
        what = "" if self.what == "loss" else f" of {self.what}"
        full, mean = contrasted(self.full, self.mean)
        return f"the objective mixes samples: full batch {full}, mean of {self.count} microbatches {mean}{what}"


def mixing_of(
    module: nn.Module,
    step: Callable[..., Any],
    batch: Piece,
    pieces: Sequence[Piece],
    precision: str,
    randomness: KeyedRandomness,
    *,
    statistics: bool = False,
) -> tuple[Mixing | None, float]:
    """Compare a step on a batch with the mean of that step on its microbatches, and return its loss; None if equal.

    ``step`` runs the step on a piece, and returns a function of its loss, a scalar, or None if there is none. With
    ``statistics`` BatchNorm's over the batch count too: it takes ``batch_norm=False``. A loss that is missing is NaN.
    """
    named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    gradients_of = partial(_gradients, parameters=[parameter for _, parameter in named])
    results = [step(piece, gradients_of) for piece in (batch, *pieces)]
    if any(result is None for result in results):
        return None, math.nan
    full, each = torch.cat(results[0]), torch.stack([torch.cat(result) for result in results[1:]], dim=1)
    shares = torch.tensor([piece.weight for piece in pieces], dtype=torch.float64)
    mean, rounding, loss = each @ (shares / shares.sum()), rounding_of(precision), float(full[0])
    if _are_equal(full, mean, rounding) or not (torch.isfinite(full).all() and torch.isfinite(each).all()):
        if statistics and has_batch_norm(module):
            unchanged = step(batch, lambda loss: float(loss.detach()), batch_norm=False)
            if abs(unchanged - loss) > rounding * abs(loss):
                return Mixing("loss", unchanged, loss, len(pieces), False), loss
        return None, loss
    weights = torch.linalg.lstsq(each, full.unsqueeze(1), driver="gelsd").solution[:, 0]
    is_weighted = _are_equal(full, each @ weights, rounding) and abs(float(weights.sum()) - 1) <= rounding
    is_weighted &= not randomness.has_undivided_draws  # else the full batch has the draws of one microbatch
    what, worst = "loss", 0
    if abs(full[0] - mean[0]) <= rounding * abs(full[0]):
        worst = int((full - mean)[1:].abs().argmax()) + 1
        ends = torch.tensor([len(gradient) for gradient in results[0][1:]]).cumsum(0)
        what = f"an element of the gradient of {named[int(torch.searchsorted(ends, worst - 1, right=True))][0]}"
    return Mixing(what, float(full[worst]), float(mean[worst]), len(pieces), is_weighted), loss


def _are_equal(full: Tensor, other: Tensor, rounding: float) -> bool:
    """Whether losses, the first elements, and gradients are equal but for rounding."""
    apart, sizes = (full - other).abs(), full.abs()
    is_near = bool(apart[0] <= rounding * sizes[0])
    return is_near and (len(full) == 1 or bool((apart[1:] <= rounding * sizes[1:].max()).all()))


def _gradients(loss: Tensor | None, parameters: Sequence[Tensor]) -> list[Tensor] | None:
    """The loss, and some elements of each gradient, evenly spaced; flat."""
    if loss is None or not loss.requires_grad:
        return None
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    dense = (gradient.to_dense() if gradient.layout != torch.strided else gradient for gradient in gradients)
    flat = (as_float64(gradient) for gradient in dense)
    return [as_float64(loss), *(elements[:: max(1, len(elements) // _SAMPLES)].clone() for elements in flat)]


def rounding_of(precision: str) -> float:
    """The relative difference of two losses that rounding explains; ``precision`` is Lightning's name of it."""
    return _ROUNDING.get(precision, 1e-2)
