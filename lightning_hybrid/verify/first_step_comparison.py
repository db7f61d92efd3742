"""Compare what ranks made of a step with what one process made of it, before any parameter changes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.mesh import Mesh
from lightning_hybrid.parts.local_shards import HeldParts
from lightning_hybrid.step.standins.absent_tensors import is_absent
from lightning_hybrid.verify.one_process.one_process_step import Alone

# How many times the noise floor is still noise: the perturbed run is one draw out of many.
_FACTOR = 20.0
# What only the order of sums makes of a number, by the precision of the arithmetic.
_ROUNDING = {"64-true": 1e-10, "32-true": 1e-4}
# A gradient this noisy has no digits of its own.
_NOISE = 1e-2


class FirstStepError(RuntimeError):
    """The first step is not that of one process, or one process cannot run it."""


@dataclass(frozen=True)
class FirstDifference:
    """A number of the first step that is not that of one process.

    Attributes:
        order: Place among the numbers compared.
        what: The loss, or the FQN of a parameter whose gradient it is.
        rank: On which rank.
        stages: Of the parameter.
        value: This rank's; of a gradient, in the element that differs most. NaN if it has none.
        reference: That of one process.
        relative: Their distance, relative to the size of the reference.
        floor: What noise alone makes of it, likewise.
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
            f" {_shown(self.value)} and {_shown(self.reference)} in one process; relative difference"
            f" {self.relative:.2g}, noise floor {self.floor:.2g}"
        )


@dataclass(frozen=True)
class Verdict:
    """What a comparison found, the same on every rank.

    Attributes:
        first: The first number that differs.
        within: The largest relative difference of those that agree.
        num_gradients: Compared.
        num_noise: Of them, those that consist of noise, so that they prove little.
    """

    first: FirstDifference | None
    within: float
    num_gradients: int
    num_noise: int


@dataclass(frozen=True)
class _Expected:
    """One gradient of the one process, as all ranks learn it."""

    dtype: torch.dtype | None
    largest: float
    noise: float


def precision_of(name: str, parameters: Sequence[Tensor]) -> str:
    """The precision whose rounding counts: modules in float64 need no ``precision="64-true"``."""
    dtypes = {parameter.dtype for parameter in parameters if parameter.is_floating_point()}
    if name in ("32-true", "64-true"):
        known = {frozenset({torch.float64}): "64-true", frozenset({torch.float32}): "32-true"}
        return known.get(frozenset(dtypes), "32-true" if dtypes <= {torch.float32, torch.float64} else "mixed")
    return name


def compare_first_step(
    alone: Alone | None,
    losses: Sequence[float],
    parameters: Mapping[str, nn.Parameter],
    stages: Mapping[str, tuple[int, ...]],
    norm: float | None,
    *,
    replica: int,
    mesh: Mesh,
    device: torch.device,
    precision: str,
    parts: HeldParts | None = None,
) -> Verdict:
    """Compare losses, gradients and the gradient norm; collective over all ranks.

    Args:
        alone: What one process made of the step; on the first rank alone.
        losses: This rank's, by batch.
        parameters: All of the module, with their gradients where this rank holds them.
        stages: Of each parameter; empty without a pipeline.
        norm: The norm of all gradients as this rank would clip by it; None if nobody clips.
        replica: Which one this rank belongs to.
        mesh: The ranks.
        device: Where messages are.
        precision: As ``precision_of`` names it.
        parts: What this rank holds of the parameters.
    """
    box: list[Any] = [None if alone is None else _summary(alone, parameters)]
    if mesh.layout.world_size > 1:
        dist.broadcast_object_list(box, src=0)
    batch_losses, noisy_losses, expected, (norm_alone, norm_noise) = box[0]
    rounding = _ROUNDING.get(precision, 1e-2)
    judge = _Judge(mesh.rank, rounding)
    for mine, row, noisy in zip(losses, batch_losses, noisy_losses, strict=True):
        judge.number("loss", mine, row[replica], abs(noisy[replica] - row[replica]))
    # Numbers below the last digit of the largest gradient are zeros that were rounded.
    smallest = max((e.largest for e in expected.values()), default=0.0) * _last_digit(precision)
    for name, one in expected.items():
        parameter = parameters[name]
        gradient = None
        if one.dtype is not None:
            if alone is not None:
                gradient = alone.gradients[name].to(device).contiguous()
            else:
                shape = parameter.shape if parts is None else parts.whole_shape(name, parameter)
                gradient = torch.empty(shape, dtype=one.dtype, device=device)
            if mesh.layout.world_size > 1:
                dist.broadcast(gradient, src=0)
        if is_absent(parameter):
            judge.pass_by()
        else:
            own = parameter.grad
            if parts is not None and own is not None:
                own = parts.whole_like(parameter, own)
            own = None if own is None else own.to(device)  # from the host, if it is at rest there
            judge.gradient(name, own, gradient, one, smallest, stages.get(name, ()))
    if norm is not None:
        judge.number("the norm of all gradients", norm, norm_alone, norm_noise)
    rows: list[Any] = [(judge.first, judge.within, judge.noisy)]
    if mesh.layout.world_size > 1:
        rows = [None] * mesh.layout.world_size
        dist.all_gather_object(rows, (judge.first, judge.within, judge.noisy))
    found = [first for first, _, _ in rows if first is not None]
    return Verdict(
        min(found, key=lambda difference: (difference.order, difference.rank), default=None),
        max(within for _, within, _ in rows),
        sum(one.dtype is not None for one in expected.values()),
        len(set().union(*(noisy for _, _, noisy in rows))),
    )


def _summary(alone: Alone, parameters: Mapping[str, nn.Parameter]) -> tuple[Any, ...]:
    expected = {}
    squares = noisy_squares = 0.0
    for name in parameters:
        gradient = alone.gradients.get(name)
        if gradient is None:
            expected[name] = _Expected(None, 0.0, 0.0)
            continue
        noisy = alone.noisy_gradients.get(name, gradient)
        expected[name] = _Expected(gradient.dtype, _largest(gradient), _largest(noisy - gradient))
        squares += float(_wide(gradient).square().sum())
        noisy_squares += float(_wide(noisy).square().sum())
    norms = math.sqrt(squares), abs(math.sqrt(noisy_squares) - math.sqrt(squares))
    return alone.losses, alone.noisy_losses, expected, norms


class _Judge:
    """Collects what one rank finds."""

    def __init__(self, rank: int, rounding: float) -> None:
        self._rank, self._rounding, self._order = rank, rounding, 0
        self.first: FirstDifference | None = None
        self.within = 0.0
        self.noisy: set[str] = set()

    def pass_by(self) -> None:
        """The next number is compared by other ranks."""
        self._order += 1

    def number(self, what: str, value: float, reference: float, noise: float) -> None:
        """Judge one number."""
        both_nan = math.isnan(value) and math.isnan(reference)
        apart = 0.0 if value == reference or both_nan else abs(value - reference)
        apart = math.inf if math.isnan(apart) else apart
        self._note(what, (), value, reference, apart, abs(reference), noise, 0.0)

    def gradient(
        self,
        name: str,
        found: Tensor | None,
        reference: Tensor | None,
        one: _Expected,
        smallest: float,
        stages: tuple[int, ...],
    ) -> None:
        """Judge the gradient of one parameter that this rank holds."""
        what = f"the gradient of {name}"
        if found is None or reference is None:
            value, expected = (math.nan if g is None else _largest(g) for g in (found, reference))
            self._note(what, stages, value, expected, 0.0 if found is reference else math.inf, 1.0, 0.0, 0.0)
            return
        now, was = _wide(found.to_dense() if found.layout != torch.strided else found), _wide(reference)
        if not was.numel():
            self.pass_by()
            return
        apart = (now - was).abs()
        apart[(now == was) | (now.isnan() & was.isnan())] = 0.0
        apart = apart.nan_to_num(math.inf, math.inf)
        worst = int(apart.argmax())
        if one.noise > _NOISE * one.largest:
            self.noisy.add(name)
        self._note(
            what, stages, float(now[worst]), float(was[worst]), float(apart[worst]), one.largest, one.noise, smallest
        )

    def _note(
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


def _last_digit(precision: str) -> float:
    return float(torch.finfo(torch.float64 if precision == "64-true" else torch.float32).eps)


def _largest(gradient: Tensor) -> float:
    """The largest finite element."""
    return float(_wide(gradient).abs().nan_to_num(0.0, 0.0).max()) if gradient.numel() else 0.0


def _wide(value: Tensor) -> Tensor:
    value = value.detach()
    if value.is_complex():
        return torch.view_as_real(value.to(torch.complex128)).reshape(-1)
    return value.to(torch.float64).reshape(-1)


def _shown(number: float) -> str:
    return "missing" if math.isnan(number) else f"{number:.10g}"
