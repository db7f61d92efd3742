"""Comparison of run records, value by value in the order of training, with a noise floor of the arithmetic.

A second reference starts from weights that are perturbed in their last digits; its distance from the first is the noise
floor. A value is the same if it differs by at most a multiple of the noise floor, or by the rounding of the precision.
Differences of parameters are relative to their update: how far the reference moved them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_hybrid.verify.record import RunRecord

# Tolerance as a multiple of the noise floor: the perturbed run is one sample of many. In 32 bits the floor is high
# enough to hide small faults; there, differences above the rounding below were at most 1.3 times the floor.
_FACTOR = {"32-true": 10.0}
# Relative differences that come from summation order only, by precision. In 32 bits right layouts have been observed
# 2e-6 off, with BatchNorm over 4 samples 8e-6.
_ROUNDING = {"64-true": 1e-10, "32-true": 2e-5}
# Units in the last place, times the root of the number of steps, by which rounding may move the weight itself: its
# update may have few significant digits.
_LAST_DIGITS = 2.0
# Values of a report that differ most.
_SHOWN = 5
# Relative tolerance of metrics that are kept in float32 whatever the precision is.
_COARSE = 1e-5


@dataclass(frozen=True, order=True)
class Key:
    """The identity of a recorded value; keys sort in the order in which values are produced."""

    step: int  # 0 before the first step, then from 1
    order: int  # position within the step
    what: str  # kind of value, such as "loss" or "update of"
    name: str = ""  # name of the metric or parameter

    @property
    def when(self) -> str:
        """The time of the value in a report."""
        names = {0: "before the first step", AT_THE_END - 1: "in validation", AT_THE_END: "after the run"}
        return names.get(self.step, f"step {self.step}")

    def __str__(self) -> str:
        """The value's name in a report."""
        return f"{self.what} {self.name}".rstrip()


AT_THE_END = 1 << 30
_CHECKPOINT, RESUMED = "the checkpoint's", "the resumed update of"
_AFTER_FIT = (_CHECKPOINT, RESUMED)


@dataclass(frozen=True)
class Difference:
    """A value that differs from the reference's."""

    key: Key  # the value
    rank: int  # the rank that recorded it
    reference: float  # the reference's value; for a tensor the element that differs most. NaN if it has none
    value: float  # the layout's value; NaN if it has none
    difference: float  # absolute difference, relative to the reference; relative to its update for a parameter
    floor: float  # the noise floor, relative to the same
    element: tuple[int, ...] = ()  # index of the element in the tensor; empty for a number
    # shapes of the reference's and the layout's tensor, if they differ
    shapes: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def __str__(self) -> str:
        """One sentence with all numbers."""
        when = self.key.when
        if self.shapes is not None:
            was, now = self.shapes
            return f"{when}: {self.key} has the shape {now} on rank {self.rank} and {was} in the reference"
        what = f"{self.key}, at {list(self.element)}," if self.element else str(self.key)
        if math.isnan(self.value) and not math.isnan(self.reference):
            return f"{when}: {what} is {self.reference:.10g} in the reference and missing or NaN on rank {self.rank}"
        if math.isnan(self.reference):
            return f"{when}: {what} is {self.value:.10g} on rank {self.rank} and missing or NaN in the reference"
        return (
            f"{when}: {what} is {self.value:.10g} on rank {self.rank} and {self.reference:.10g} in the reference;"
            f" relative difference {self.difference:.2g}{f', noise floor {self.floor:.2g}' if self.floor else ''}"
        )


def worst(differences: Sequence[Difference]) -> tuple[Difference, ...]:
    """The values that differ most, the worst first, of the first step that differs: each follows from that step."""
    largest: dict[Key, Difference] = {}
    for each in differences:
        if each.key.step == differences[0].key.step:
            largest[each.key] = max(largest.get(each.key, each), each, key=lambda one: one.difference)
    return tuple(sorted(largest.values(), key=lambda one: -one.difference)[:_SHOWN])


def is_step_number(key: Key, logged: Collection[str]) -> bool:
    """Whether a value is a metric of the Trainer that a step has logged as a plain number, under one of these names."""
    name = key.name.partition("/dataloader_idx_")[0]
    ends = (name, *(name.removesuffix(end) for end in ("_step", "_epoch")))
    return key.what.startswith("metric") and any(end in logged for end in ends)


class Margin(NamedTuple):
    """A difference that counts as rounding, and the limit for it; both relative as ``Difference.difference`` is."""

    share: float  # the difference as a share of its limit
    difference: float  # the difference
    limit: float  # the largest difference that counts as rounding


def compare(
    ranks: Sequence[RunRecord],
    reference: RunRecord,
    noisy: RunRecord,
    *,
    precision: str,
    margins: list[Margin] | None = None,
) -> list[Difference]:
    """List all values that differ, the earliest first; ``margins`` receives those that differ by rounding.

    ``noisy`` is the record of the reference with perturbed initial weights, ``precision`` such as "64-true".
    """
    margins = [] if margins is None else margins
    factor, relative = _FACTOR.get(precision, 50.0), _ROUNDING.get(precision, 5e-2)
    differences: list[Difference] = []
    recorded: set[Key] = set()
    expected_keys: set[Key] = set()
    per_replica = bool(reference.replica_losses) or len(ranks) == 1
    mean_losses = None if per_replica else _mean_losses(ranks)
    for rank, observed in enumerate(ranks):
        # A second reference records all replicas, as the first does.
        is_reference = bool(observed.replica_losses)
        expected = _values(reference) if is_reference else _of_replica(reference, observed.replica)
        noise = _subtract_perturbation(_values(noisy) if is_reference else _of_replica(noisy, observed.replica), noisy)
        actual = _values(observed, mean_losses)
        expected_keys.update(expected)
        recorded.update(actual)
        for key in sorted(expected.keys() | actual.keys()):
            if key not in actual and _is_sharded(key):
                continue  # another rank may have it; whether any has it is checked below
            difference = _judge(
                key, rank, expected.get(key), actual.get(key), noise.get(key), reference, relative, factor, margins
            )
            if difference is not None:
                differences.append(difference)
    for key in expected_keys - recorded:
        if _is_sharded(key):
            differences.append(Difference(key, 0, _shown(_of_replica(reference, 0)[key]), math.nan, math.inf, 0.0))
    return sorted(differences, key=lambda d: (d.key, d.rank))


def noise_by_parameter(reference: RunRecord, noisy: RunRecord) -> dict[str, float]:
    """The noise floor of the update of each parameter after the run, relative to that update, by FQN."""
    return {
        name: float(
            (as_float64(_without_initial_noise(noisy.weights[name], name, noisy)) - as_float64(value)).abs().max()
        )
        / update
        for name, value in reference.weights.items()
        if value.numel() and (update := _largest_update(reference.start, name, value)) > 0
    }


def unmoved(observed: RunRecord) -> list[str]:
    """Parameters that require gradients and that the run did not change."""
    return [
        name
        for name in observed.trained
        if name in observed.start and torch.equal(observed.start[name], observed.weights[name])
    ]


def _is_sharded(key: Key) -> bool:
    """Whether each rank records only some of these values: the values of its own parameters."""
    return key.what in ("initial weights of", "gradient norm of", "update of", *_AFTER_FIT)


def _values(observed: RunRecord, losses: Sequence[float | None] | None = None) -> dict[Key, Tensor]:
    values: dict[Key, Any] = {Key(0, 0, "initial weights of", name): weight for name, weight in observed.start.items()}
    for number, step in enumerate(observed.steps, 1):
        loss = step.loss if losses is None else losses[number - 1]
        rates = {str(group): rate for group, rate in enumerate(step.learning_rates)}
        values |= _keyed(number, 0, "loss", {} if loss is None else {"": loss})
        values |= _keyed(number, 1, "metric", step.metrics)
        values |= _keyed(number, 2, "gradient norm of", step.grad_norms)
        values |= _keyed(number, 3, "learning rate of group", rates)
        values |= _keyed(number, 4, "update of", step.weights)
    for index, metrics in enumerate(observed.validations):
        values |= _keyed(AT_THE_END - 1, index, f"metric after validation {index + 1}:", metrics)
    values |= _keyed(AT_THE_END, 0, "weights", observed.weights)
    values |= _keyed(AT_THE_END, 1, "metric", observed.metrics)
    values |= _keyed(AT_THE_END, 2, "buffer", observed.buffers)
    values |= _keyed(AT_THE_END, 3, "metric after test:", observed.tests)
    values |= _keyed(AT_THE_END, 4, "prediction", observed.predictions)
    values |= _keyed(AT_THE_END, 5, _CHECKPOINT, observed.checkpoint)
    values |= _keyed(AT_THE_END, 6, RESUMED, observed.resumed)
    return {key: value if isinstance(value, Tensor) else as_number(value) for key, value in values.items()}


def _keyed(step: int, order: int, what: str, named: Mapping[str, Any]) -> dict[Key, Any]:
    return {Key(step, order, what, name): value for name, value in named.items()}


def _of_replica(reference: RunRecord, replica: int) -> dict[Key, Tensor]:
    """The values of a reference, with the values that it has of this replica."""
    values = _values(reference)
    for number, losses in enumerate(reference.replica_losses, 1):
        if losses:
            values[Key(number, 0, "loss")] = as_number(losses[min(replica, len(losses) - 1)])
    if buffers := reference.replica_buffers[replica : replica + 1] or reference.replica_buffers[-1:]:
        values |= _keyed(AT_THE_END, 2, "buffer", buffers[0])
    if predicted := reference.replica_predictions[replica : replica + 1] or reference.replica_predictions[-1:]:
        values = {key: value for key, value in values.items() if key.what != "prediction"}
        values |= _keyed(AT_THE_END, 4, "prediction", predicted[0])
    return values


def _subtract_perturbation(values: dict[Key, Tensor], noisy: RunRecord) -> dict[Key, Tensor]:
    """Subtract the initial perturbation from the weights, so that only the noise of their updates remains.

    In 32 bits the perturbation is larger than many updates: an update could be missing and still count as noise.
    """
    return {
        key: _without_initial_noise(value, key.name, noisy) if _is_weight(key, noisy) else value
        for key, value in values.items()
    }


def _without_initial_noise(weight: Tensor, name: str, noisy: RunRecord) -> Tensor:
    start, perturbed = noisy.start.get(name), noisy.perturbed.get(name)
    if start is None or perturbed is None or not (start.shape == perturbed.shape == weight.shape):
        return weight
    wide = torch.complex128 if weight.is_complex() else torch.float64
    return weight.to(wide) - (perturbed.to(wide) - start.to(wide))


def _mean_losses(ranks: Sequence[RunRecord]) -> list[float | None]:
    """The mean loss of each step over the replicas, each counted once."""
    firsts = {observed.replica: observed for observed in reversed(ranks)}.values()
    rows = zip(*([step.loss for step in observed.steps] for observed in firsts), strict=False)
    return [None if None in row else sum(loss or 0.0 for loss in row) / len(row) for row in rows]


def _judge(
    key: Key,
    rank: int,
    expected: Tensor | None,
    actual: Tensor | None,
    noise: Tensor | None,
    reference: RunRecord,
    relative: float,
    factor: float,
    margins: list[Margin],
) -> Difference | None:
    if expected is None or actual is None:
        return Difference(key, rank, _shown(expected), _shown(actual), math.inf, 0.0)
    if expected.shape != actual.shape:
        shapes = tuple(expected.shape), tuple(actual.shape)
        return Difference(key, rank, _shown(expected), _shown(actual), math.inf, 0.0, shapes=shapes)
    if expected.numel() == 0 or torch.equal(expected, actual):
        return None
    worst, was, now, largest = farthest(expected, actual)
    scale = _scale(key, expected, reference)
    floor = 0.0
    if noise is not None and noise.shape == expected.shape:
        floor = float((as_float64(noise) - as_float64(expected)).abs().nan_to_num(0.0, 0.0).max())
    if key.what.startswith("metric") and key.name in reference.coarse:
        relative = max(relative, _COARSE)
    limit, unit = max(factor * floor, relative * scale + _last_digits(key, expected, reference)), scale or 1.0
    if largest <= limit:
        margins.append(Margin(largest / limit if limit else 0.0, largest / unit, limit / unit))
        return None
    element = torch.unravel_index(torch.tensor(worst // (1 + expected.is_complex())), expected.shape)
    at = tuple(map(int, element))
    return Difference(key, rank, was, now, largest / unit, floor / unit, at)


def farthest(expected: Tensor, actual: Tensor) -> tuple[int, float, float, float]:
    """The element that differs most between two tensors of one shape: its index, both values, and their distance."""
    was, now = as_float64(expected), as_float64(actual)
    apart = (now - was).abs()
    apart[was.isnan() & now.isnan() | (was == now)] = 0.0  # infinities too
    apart = apart.nan_to_num(math.inf, math.inf)
    worst = int(apart.argmax())
    return worst, float(was[worst]), float(now[worst]), float(apart[worst])


def _scale(key: Key, expected: Tensor, reference: RunRecord) -> float:
    """The size that a difference is relative to."""
    size = largest_of(expected)
    if key.what == RESUMED:
        return _largest_update(reference.weights, key.name, expected)
    if _is_weight(key, reference):
        return _largest_update(reference.start, key.name, expected)
    if key.what == _CHECKPOINT:
        # As below, for a moment of this gradient, or its square.
        alike = key.name.partition(" of ")[0]
        others = [largest_of(value) for name, value in reference.checkpoint.items() if name.startswith(f"{alike} of ")]
        return max(size, 1e-4 * max(others, default=0.0))
    if key.what == "gradient norm of":
        # A gradient that is zero except for rounding (a key's bias) has no significant digits to compare.
        return max(size, 1e-2 * max(reference.steps[key.step - 1].grad_norms.values(), default=0.0))
    return size


def _last_digits(key: Key, weight: Tensor, reference: RunRecord) -> float:
    """The absolute error that rounding may cause in a weight in the steps so far."""
    if not _is_weight(key, reference) or not (weight.is_floating_point() or weight.is_complex()):
        return 0.0
    steps = min(key.step, len(reference.steps) + 1)
    return _LAST_DIGITS * math.sqrt(steps) * torch.finfo(weight.dtype).eps * largest_of(weight)


def _is_weight(key: Key, reference: RunRecord) -> bool:
    """Whether a value belongs to a parameter, whose update counts."""
    return key.what in ("update of", "weights", RESUMED) or (key.what == _CHECKPOINT and key.name in reference.weights)


def largest_of(value: Tensor) -> float:
    """The largest finite element of a tensor of any shape."""
    return float(as_float64(value).abs().nan_to_num(0.0, 0.0, 0.0).max()) if value.numel() else 0.0


def _largest_update(before: Mapping[str, Tensor], name: str, weight: Tensor) -> float:
    start = before.get(name)
    if start is None or start.shape != weight.shape or not weight.numel():
        return 0.0
    return largest_of(as_float64(weight) - as_float64(start))


def as_number(value: float) -> Tensor:
    """A scalar in float64."""
    return torch.tensor(value, dtype=torch.float64)


def as_float64(value: Tensor) -> Tensor:
    """The elements of a tensor of any shape in float64, 1-D and detached; a complex element is two."""
    value = value.detach()
    if value.is_complex():
        return torch.view_as_real(value.to(torch.complex128)).reshape(-1)
    return value.to(torch.float64).reshape(-1)


def _shown(value: Tensor | None) -> float:
    return math.nan if value is None or not value.numel() else float(as_float64(value)[0])
