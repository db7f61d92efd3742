"""Comparison of a layout's first step (losses, gradients) with the same step in one process, before any update."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.mesh import Mesh
from lightning_hybrid.params.shards import LocalShards
from lightning_hybrid.step.standins.absent_tensors import is_absent
from lightning_hybrid.verify.one_process.first_step import OneProcessResult
from lightning_hybrid.verify.records.compare import as_float64, as_number, farthest, largest_of

# Tolerance as a multiple of the noise floor: the perturbed run is one sample of many.
_FACTOR = 20.0
# Relative differences that come from summation order only, by the precision of the arithmetic.
_ROUNDING = {"64-true": 1e-10, "32-true": 1e-4}
# A gradient whose relative noise is larger has no significant digits.
_NOISE = 1e-2


@dataclass(frozen=True)
class FirstDifference:
    """A number of the first step that differs from that of one process.

    Attributes:
        order: Position among the numbers compared.
        what: Description of the number: the loss, or the gradient of a parameter by its FQN.
        rank: The rank that compared it.
        stages: Pipeline stages of the parameter.
        value: This rank's value; for a gradient, the element that differs most. NaN if it has none.
        reference: The value in one process.
        relative: Absolute difference, relative to the size of the reference.
        floor: The noise floor, relative to the same.
    """

    order: int
    what: str
    rank: int
    stages: tuple[int, ...]
    value: float
    reference: float
    relative: float
    floor: float

    def __str__(self) -> str:
        """One sentence with all numbers."""
        stage = f"stage {', '.join(map(str, self.stages))}, " if self.stages else ""
        return (
            f"the first step is not that of one process: {self.what} ({stage}rank {self.rank}) is"
            f" {_format(self.value)} and {_format(self.reference)} in one process; relative difference"
            f" {self.relative:.2g}{f', noise floor {self.floor:.2g}' if self.floor else ''}"
        )


@dataclass(frozen=True)
class Verdict:
    """The result of a comparison, the same on every rank.

    Attributes:
        first: The first number that differs.
        within: The largest relative difference of those that agree.
        num_gradients: Number of gradients compared.
        num_noise: Number of these that consist of noise, so that they prove little.
    """

    first: FirstDifference | None
    within: float
    num_gradients: int
    num_noise: int


def precision_of(name: str, parameters: Sequence[Tensor]) -> str:
    """The precision whose rounding applies, by the dtypes of parameters of any shapes: float64 needs no "64-true"."""
    dtypes = {parameter.dtype for parameter in parameters if parameter.is_floating_point()}
    if name in ("32-true", "64-true"):
        uniform = {frozenset({torch.float64}): "64-true", frozenset({torch.float32}): "32-true"}
        return uniform.get(frozenset(dtypes), "32-true" if dtypes <= {torch.float32, torch.float64} else "mixed")
    return name


def compare_first_step(
    single: OneProcessResult | None,
    losses: Sequence[float],
    parameters: Mapping[str, nn.Parameter],
    stages: Mapping[str, tuple[int, ...]],
    norm: float | None,
    *,
    replica: int,
    mesh: Mesh,
    device: torch.device,
    precision: str,
    parts: LocalShards | None = None,
) -> Verdict:
    """Compare losses, gradients and the gradient norm; collective over all ranks.

    Args:
        single: The result of one process; None on all ranks but the first.
        losses: This rank's losses, by batch.
        parameters: All parameters by FQN, with their gradients on the ranks that have them.
        stages: Pipeline stages of each parameter; empty without a pipeline.
        norm: The norm of all gradients by which this rank would clip; None without clipping.
        replica: Index of this rank's replica.
        mesh: The process groups.
        device: Device of the messages.
        precision: Result of ``precision_of``.
        parts: Local shards of the parameters.
    """
    box: list[Any] = [None if single is None else _summary(single)]
    if mesh.layout.world_size > 1:
        dist.broadcast_object_list(box, src=0)
    batch_losses, noisy_losses, expected, (single_norm, norm_noise) = box[0]
    found = _Found(mesh.rank, _ROUNDING.get(precision, 1e-2))
    for loss, row, noisy in zip(losses, batch_losses, noisy_losses, strict=True):
        found.add(0, "loss", as_number(loss), as_number(row[replica]), abs(noisy[replica] - row[replica]))
    # Numbers below the last digit of the largest gradient are zeros that were rounded.
    last_digit = torch.finfo(torch.float64 if precision == "64-true" else torch.float32).eps
    smallest = max((largest for _, largest, _ in expected.values()), default=0.0) * last_digit
    for order, (name, parameter) in enumerate(parameters.items(), 1):
        dtype, _, noise = expected.get(name, (None, 0.0, 0.0))
        shape = parameter.shape if parts is None else parts.full_shape(name, parameter)
        reference = None if dtype is None else _broadcast(single, name, torch.empty(shape, dtype=dtype, device=device))
        if is_absent(parameter):
            continue
        gradient = parameter.grad
        if parts is not None and gradient is not None:
            gradient = parts.full_state_of(parameter, gradient)
        if gradient is not None:  # on the host, if it is offloaded there
            gradient = (gradient if gradient.layout == torch.strided else gradient.to_dense()).to(device)
        found.add(order, f"the gradient of {name}", gradient, reference, noise, stages.get(name, ()), smallest)
    if norm is not None:
        found.add(len(parameters) + 1, "the norm of all gradients", as_number(norm), as_number(single_norm), norm_noise)
    return found.merged(mesh, num_gradients=len(expected))


def _broadcast(single: OneProcessResult | None, name: str, empty: Tensor) -> Tensor:
    """Send a gradient of the one process to all ranks: one by one, as all of them may not fit."""
    gradient = empty if single is None else single.gradients[name].to(empty.device).contiguous()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast(gradient, src=0)
    return gradient


def _summary(single: OneProcessResult) -> tuple[Any, ...]:
    """What all ranks know of the one process: losses, then dtype, largest element and noise of each gradient, norms."""
    expected: dict[str, tuple[torch.dtype, float, float]] = {}
    squares = [0.0, 0.0]
    for name, gradient in single.gradients.items():
        noisy = single.noisy_gradients.get(name, gradient)
        expected[name] = gradient.dtype, largest_of(gradient), largest_of(noisy - gradient)
        squares = [s + float(as_float64(g).square().sum()) for s, g in zip(squares, (gradient, noisy), strict=True)]
    norm, noisy_norm = map(math.sqrt, squares)
    return single.losses, single.noisy_losses, expected, (norm, abs(noisy_norm - norm))


class _Found:
    """What one rank finds: the first difference, the largest of those that are none, and the gradients of noise."""

    def __init__(self, rank: int, rounding: float) -> None:
        self._rank, self._rounding = rank, rounding
        self._first: FirstDifference | None = None
        self._within, self._noisy = 0.0, set[str]()

    def merged(self, mesh: Mesh, num_gradients: int) -> Verdict:
        """What all ranks have found; collective."""
        own = self._first, self._within, self._noisy
        rows: list[Any] = [own] * mesh.layout.world_size
        if mesh.layout.world_size > 1:
            dist.all_gather_object(rows, own)
        differences = [first for first, _, _ in rows if first is not None]
        first = min(differences, key=lambda difference: (difference.order, difference.rank), default=None)
        noisy = set().union(*(noisy for _, _, noisy in rows))
        return Verdict(first, max(within for _, within, _ in rows), num_gradients, len(noisy))

    def add(
        self,
        order: int,
        what: str,
        actual: Tensor | None,
        expected: Tensor | None,
        noise: float,
        stages: tuple[int, ...] = (),
        smallest: float = 0.0,
    ) -> None:
        """Compare one number, or the full gradient of one parameter, with that of one process; None if it has none."""
        if actual is None or expected is None:
            value, was = (math.nan if each is None else largest_of(each) for each in (actual, expected))
            apart, size, noise = 0.0 if actual is expected else math.inf, 1.0, 0.0
        elif not expected.numel():
            return
        else:
            _, was, value, apart = farthest(expected, actual)
            size = largest_of(expected)
            if what.startswith("the gradient") and noise > _NOISE * size:
                self._noisy.add(what)
        if apart > max(_FACTOR * noise, self._rounding * size, smallest):
            unit = size or 1.0
            if self._first is None:
                self._first = FirstDifference(order, what, self._rank, stages, value, was, apart / unit, noise / unit)
        elif noise <= _NOISE * size and apart > smallest:
            self._within = max(self._within, apart / (size or 1.0))


def _format(number: float) -> str:
    return "missing" if math.isnan(number) else f"{number:.10g}"
