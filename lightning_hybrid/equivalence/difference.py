"""Differences between outputs and gradients of a sharded run and of the full unit, in words and as a number.

Gradients of large layers are compared a few rows at a time, so that no tensor of their size is made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_BLOCK = 2**15  # elements that are compared together: they stay in the cache of one core


class Difference(str):
    """A difference between two values, in words."""

    relative: float = math.inf  # the relative difference of numbers; infinite for other differences


def difference_of(found: Any, wanted: Any, tolerance: float, *, full: Tensor | None = None) -> Difference | None:
    """The difference between two values, or None: other values than tensors are compared by type.

    The tolerance is relative to the largest element of the wanted tensor, or of ``full`` if that is a shard of it;
    found and wanted have one shape.
    """
    if not isinstance(wanted, Tensor) or not isinstance(found, Tensor):
        types = type(found).__name__, type(wanted).__name__
        return None if type(found) is type(wanted) else Difference("{} instead of {}".format(*types))
    return difference_of_sum([found], wanted, tolerance, full=full)


def difference_of_sum(
    addends: Sequence[Tensor], wanted: Tensor, tolerance: float, *, full: Tensor | None = None
) -> Difference | None:
    """The difference between the sum of tensors of one shape and a tensor of it, or None, as in `difference_of`."""
    found = addends[0]
    if found.shape != wanted.shape:
        return Difference(f"shape {tuple(found.shape)} instead of {tuple(wanted.shape)}")
    if not (wanted.is_floating_point() or wanted.is_complex()) or not wanted.numel():
        return None if torch.equal(found, wanted) else Difference("other values")
    scale = _scale_of(wanted if full is None else full)
    if not math.isfinite(scale):
        return Difference("the unit itself gives values that are not finite")
    distance = _distance(addends, wanted) / max(scale, 1e-3)
    if distance <= tolerance:
        return None
    difference = Difference(f"relative difference {distance:.1e}, more than {tolerance:.0e}")
    difference.relative = distance
    return difference


def _scale_of(wanted: Tensor) -> float:
    """The absolute value of its largest element; cached, as many trials are compared with one run of the full unit."""
    cached = wanted.__dict__.get("_scale")
    if cached is None:
        cached = wanted.__dict__["_scale"] = _largest(wanted)
    return float(cached)


def are_equal_within(found: Tensor, wanted: Tensor, tolerance: float, *, full: Tensor) -> bool:
    """Whether there is no difference in the sense of `difference_of`; for floating values of one shape."""
    limit = tolerance * max(_scale_of(full), 1e-3)
    return not wanted.numel() or _distance([found], wanted, limit) <= limit


def _distance(addends: Sequence[Tensor], wanted: Tensor, limit: float = math.inf) -> float:
    """The largest distance of elements, or one beyond ``limit``; NaN if an element is NaN."""
    tensors = [tensor.detach() for tensor in (*addends, wanted)]
    rows = max(1, _BLOCK * wanted.shape[0] // wanted.numel()) if wanted.dim() else 1
    if not wanted.dim() or rows >= len(wanted):
        return _largest(sum(tensors[1:-1], tensors[0]) - tensors[-1])
    largest = 0.0
    for block in zip(*(tensor.split(rows) for tensor in tensors), strict=True):
        distance = _largest(sum(block[1:-1], block[0]) - block[-1])
        if math.isnan(distance) or distance > limit:
            return distance
        largest = max(largest, distance)
    return largest


def _largest(values: Tensor) -> float:
    values = values.detach()
    low, high = torch.aminmax(torch.view_as_real(values) if values.is_complex() else values)
    # These operations pass NaN on.
    return float(torch.maximum(-low, high))
