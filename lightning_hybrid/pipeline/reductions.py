"""How parts of a batch give its numbers: as their mean, sum, maximum or minimum, but for rounding."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_hybrid.batch.denominators import Mean, error_bound, rounding_of
from lightning_hybrid.batch.merge import REDUCTIONS, Argument, Leaf
from lightning_hybrid.pipeline.logs import Key, NumberKey

# Relative differences of losses that rounding may cause, by dtype.
_ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-3}
_ROUNDING_OF_HALF = 5e-2
_NEARER = 10.0  # times, that the largest or least of parts must be nearer to a number than their mean or sum


def rounded_as(loss: Tensor) -> torch.dtype:
    """The dtype in which a scalar loss was computed; call it inside of autocast."""
    return torch.float16 if torch.is_autocast_enabled(loss.device.type) else loss.dtype


def is_same(full: float, mean: float, dtype: torch.dtype) -> bool:
    """Whether the loss of a batch, of this dtype, equals its microbatches' but for rounding, or is not finite."""
    near = _ROUNDING.get(dtype, _ROUNDING_OF_HALF)
    return not math.isfinite(full) or math.isclose(full, mean, rel_tol=near, abs_tol=near * 1e-3)


def is_close(one: Tensor, other: Tensor, rounding: torch.dtype) -> bool:
    """Whether tensors of one shape are equal but for rounding at their largest element."""
    if not one.is_floating_point() or not one.numel():
        return torch.equal(one, other)
    if not torch.equal(one.isnan(), other.isnan()):
        return False
    one, other = one.double().nan_to_num(), other.double().nan_to_num()
    scale = float(one.abs().max())
    return is_same(scale + float((one - other).abs().max()), scale, rounding)


def reductions_of(logged: Mean, weightings: Sequence[Sequence[Sequence[float]]], dtype: torch.dtype) -> list[str]:
    """How the parts' numbers may give a logged number of the batch: as "mean", "sum", "max" or "min".

    Args:
        logged: The number, of the batch and of its parts.
        weightings: The ways to weigh a mean; of each, the weights of the parts by partition.
        dtype: The dtype of its rounding. Numbers of 16 bits may be the mean and, by chance, also the largest.
    """
    errors = {how: max(abs(of(each) - logged.full) for each in logged.parts) for how, of in REDUCTIONS.items()}
    is_half, scale = dtype not in _ROUNDING, abs(logged.full) or 1.0
    bound = _ROUNDING_OF_HALF * scale if is_half else 10 * rounding_of(scale, dtype)
    found = [how for how, error in errors.items() if error <= bound]
    if not all(error_bound(logged, weights, dtype) for weights in weightings):
        return ["mean", *found]
    if is_half and any(difference_of(logged, weights, dtype) is None for weights in weightings):
        exact = [how for how in found if not errors[how]]
        return [*exact, "mean"] if exact else ["mean", *found]
    if found or is_half:
        return found
    # A long sum in another order: nothing else comes near.
    how = min(errors, key=errors.__getitem__)
    others = [max(logged.errors(weights)) for weights in weightings] + [errors[key] for key in errors if key != how]
    return [how] if errors[how] <= min(_ROUNDING[dtype] * scale, min(others) / 100) else []


def is_decided(hows: Sequence[str]) -> bool:
    """Whether these ways to make a number tell it: what is equal in all is any, but zeros are sums too."""
    return len(hows) == 1 or (hows[:1] == ["mean"] and "sum" not in hows)


def nearest_reductions(
    hows: Mapping[NumberKey, Sequence[str]], unexplained: Sequence[tuple[NumberKey, float, float, str]]
) -> tuple[tuple[Key, str], ...]:
    """How parts make what they do not give, or what several ways give, and the mean does not; of logged numbers."""
    undecided = [(key, how[0]) for key, how in hows.items() if how and not is_decided(how) and how[0] != "mean"]
    found = [*((key, how) for key, *_, how in unexplained), *undecided]
    return tuple((key, how) for key, how in found if not isinstance(key, Argument | Leaf))


def nearest_number(key: NumberKey, logged: Mean, weights: list[list[float]]) -> tuple[NumberKey, float, float, str]:
    """A number that parts do not give, what is taken for it, and how; a metric takes means."""

    def number(how: str, parts: Sequence[float], of: Sequence[float]) -> float:
        if how in REDUCTIONS:
            return float(REDUCTIONS[how](parts))
        return sum(part * weight for part, weight in zip(parts, of, strict=True))

    def error(how: str) -> float:
        pairs = zip(logged.parts, weights, strict=True)
        return max(abs(number(how, parts, of) - logged.full) for parts, of in pairs)

    how, extreme = min(("mean", "sum"), key=error), min(("max", "min"), key=error)
    how = extreme if _NEARER * error(extreme) < error(how) else how
    how = "mean" if isinstance(key, Argument) else how
    return key, logged.full, number(how, logged.parts[0], weights[0]), how


def difference_of(loss: Mean, weights: Sequence[Sequence[float]], dtype: torch.dtype) -> tuple[float, float] | None:
    """The loss of a batch and another mean over its parts; None if all are the same but for rounding."""
    for parts, of in zip(loss.parts, weights, strict=True):
        mean = sum(part * weight for part, weight in zip(parts, of, strict=True))
        if not is_same(loss.full, mean, dtype):
            return loss.full, mean
    return None
