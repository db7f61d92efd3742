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
from lightning_hybrid.parts.shard_and_unshard_parameters import LocalShards
from lightning_hybrid.step.standins.absent_tensors import is_absent
from lightning_hybrid.verify.one_process.one_process_step import OneProcessResult
from lightning_hybrid.verify.records.record_comparison import as_float64

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


@dataclass(frozen=True)
class _Expected:
    """Dtype, largest element and noise of one gradient of the one process, as broadcast to all ranks."""

    dtype: torch.dtype | None
    largest: float
    noise: float


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
    box: list[Any] = [None if single is None else _summary(single, parameters)]
    if mesh.layout.world_size > 1:
        dist.broadcast_object_list(box, src=0)
    batch_losses, noisy_losses, expected, (single_norm, norm_noise) = box[0]
    comparison = _RankComparison(mesh.rank, _ROUNDING.get(precision, 1e-2))
    for loss, row, noisy in zip(losses, batch_losses, noisy_losses, strict=True):
        comparison.number("loss", loss, row[replica], abs(noisy[replica] - row[replica]))
    # Numbers below the last digit of the largest gradient are zeros that were rounded.
    last_digit = torch.finfo(torch.float64 if precision == "64-true" else torch.float32).eps
    smallest = max((e.largest for e in expected.values()), default=0.0) * last_digit
    for name, one in expected.items():
        parameter = parameters[name]
        shape = parameter.shape if parts is None else parts.full_shape(name, parameter)
        reference = _broadcast_reference(single, name, one, shape, mesh, device)
        if is_absent(parameter):
            comparison.skip()
        else:
            gradient = parameter.grad
            if parts is not None and gradient is not None:
                gradient = parts.full_state_of(parameter, gradient)
            gradient = None if gradient is None else gradient.to(device)  # from the host, if it is offloaded there
            comparison.gradient(name, gradient, reference, one, smallest, stages.get(name, ()))
    if norm is not None:
        comparison.number("the norm of all gradients", norm, single_norm, norm_noise)
    return _merged(comparison, sum(one.dtype is not None for one in expected.values()), mesh)


def _broadcast_reference(
    single: OneProcessResult | None, name: str, one: _Expected, shape: Sequence[int], mesh: Mesh, device: torch.device
) -> Tensor | None:
    """Broadcast the full gradient of one parameter from the first rank; None if it has none."""
    if one.dtype is None:
        return None
    if single is not None:
        gradient = single.gradients[name].to(device).contiguous()
    else:
        gradient = torch.empty(shape, dtype=one.dtype, device=device)
    if mesh.layout.world_size > 1:
        dist.broadcast(gradient, src=0)
    return gradient


def _merged(comparison: _RankComparison, num_gradients: int, mesh: Mesh) -> Verdict:
    rows: list[Any] = [(comparison.first, comparison.within, comparison.noisy)]
    if mesh.layout.world_size > 1:
        rows = [None] * mesh.layout.world_size
        dist.all_gather_object(rows, (comparison.first, comparison.within, comparison.noisy))
    differences = [first for first, _, _ in rows if first is not None]
    return Verdict(
        min(differences, key=lambda difference: (difference.order, difference.rank), default=None),
        max(within for _, within, _ in rows),
        num_gradients,
        len(set().union(*(noisy for _, _, noisy in rows))),
    )


def _summary(single: OneProcessResult, parameters: Mapping[str, nn.Parameter]) -> tuple[Any, ...]:
    expected = {}
    squares = noisy_squares = 0.0
    for name in parameters:
        gradient = single.gradients.get(name)
        if gradient is None:
            expected[name] = _Expected(None, 0.0, 0.0)
            continue
        noisy = single.noisy_gradients.get(name, gradient)
        expected[name] = _Expected(gradient.dtype, _largest(gradient), _largest(noisy - gradient))
        squares += float(as_float64(gradient).square().sum())
        noisy_squares += float(as_float64(noisy).square().sum())
    norms = math.sqrt(squares), abs(math.sqrt(noisy_squares) - math.sqrt(squares))
    return single.losses, single.noisy_losses, expected, norms


class _RankComparison:
    """The differences that one rank finds."""

    def __init__(self, rank: int, rounding: float) -> None:
        self._rank, self._rounding, self._order = rank, rounding, 0
        self.first: FirstDifference | None = None
        self.within = 0.0
        self.noisy: set[str] = set()

    def skip(self) -> None:
        """Count a number that only other ranks compare."""
        self._order += 1

    def number(self, what: str, value: float, reference: float, noise: float) -> None:
        """Compare one number."""
        both_nan = math.isnan(value) and math.isnan(reference)
        apart = 0.0 if value == reference or both_nan else abs(value - reference)
        apart = math.inf if math.isnan(apart) else apart
        self._record(what, (), value, reference, apart, abs(reference), noise, 0.0)

    def gradient(
        self,
        name: str,
        gradient: Tensor | None,
        reference: Tensor | None,
        one: _Expected,
        smallest: float,
        stages: tuple[int, ...],
    ) -> None:
        """Compare the full gradient of one parameter that this rank has, of the shape of its reference."""
        what = f"the gradient of {name}"
        if gradient is None or reference is None:
            value, expected = (math.nan if g is None else _largest(g) for g in (gradient, reference))
            self._record(what, stages, value, expected, 0.0 if gradient is reference else math.inf, 1.0, 0.0, 0.0)
            return
        gradient = gradient.to_dense() if gradient.layout != torch.strided else gradient
        now, was = as_float64(gradient), as_float64(reference)
        if not was.numel():
            self.skip()
            return
        apart = (now - was).abs()
        apart[(now == was) | (now.isnan() & was.isnan())] = 0.0
        apart = apart.nan_to_num(math.inf, math.inf)
        worst = int(apart.argmax())
        if one.noise > _NOISE * one.largest:
            self.noisy.add(name)
        self._record(
            what, stages, float(now[worst]), float(was[worst]), float(apart[worst]), one.largest, one.noise, smallest
        )

    def _record(
        self,
        what: str,
        stages: tuple[int, ...],
        value: float,
        reference: float,
        apart: float,
        size: float,
        noise: float,
        smallest: float,
    ) -> None:
        self._order += 1
        unit = size or 1.0
        if apart > max(_FACTOR * noise, self._rounding * size, smallest):
            if self.first is None:
                self.first = FirstDifference(
                    self._order, what, self._rank, stages, value, reference, apart / unit, noise / unit
                )
        elif noise <= _NOISE * size and apart > smallest:
            self.within = max(self.within, apart / unit)


def _largest(gradient: Tensor) -> float:
    """The largest finite element."""
    return float(as_float64(gradient).abs().nan_to_num(0.0, 0.0).max()) if gradient.numel() else 0.0


def _format(number: float) -> str:
    return "missing" if math.isnan(number) else f"{number:.10g}"
