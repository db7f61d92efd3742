"""The differences between outputs and gradients of a sharded run and of the full unit, in words and as a number.

Gradients of large layers are held against each other a few rows at a time, so that nothing of their size is made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_BLOCK = 2**15  # elements that are looked at together: they stay in the cache of one core


class Difference(str):
    """What differs, in words.

    Attributes:
        relative: By how much, if by numbers alone; infinite otherwise.
    """

    relative: float = math.inf


def difference_of(found: Any, wanted: Any, tolerance: float, *, whole: Tensor | None = None) -> Difference | None:
    """What differs between two values, or None.

    Args:
        found: A value of a sharded run.
        wanted: The same of the whole unit.
        tolerance: Relative to the largest element of the whole.
        whole: The value of which the wanted one is a part.
    """
    if not isinstance(wanted, Tensor) or not isinstance(found, Tensor):
        types = type(found).__name__, type(wanted).__name__
        return None if type(found) is type(wanted) else Difference("{} instead of {}".format(*types))
    return difference_of_sum([found], wanted, tolerance, whole=whole)


def difference_of_sum(
    addends: Sequence[Tensor], wanted: Tensor, tolerance: float, *, whole: Tensor | None = None
) -> Difference | None:
    """What differs between the sum of tensors of one shape and another tensor, or None; see `difference_of`."""
    found = addends[0]
    if found.shape != wanted.shape:
        return Difference(f"shape {tuple(found.shape)} instead of {tuple(wanted.shape)}")
    if not wanted.is_floating_point() or not wanted.numel():
        return None if torch.equal(found, wanted) else Difference("other values")
    scale = _scale_of(wanted if whole is None else whole)
    if not math.isfinite(scale):
        return Difference("the unit itself gives values that are not finite")
    distance = _distance(addends, wanted) / max(scale, 1e-3)
    if distance <= tolerance:
        return None
    difference = Difference(f"relative difference {distance:.1e}, more than {tolerance:.0e}")
    difference.relative = distance
    return difference


def _scale_of(wanted: Tensor) -> float:
    """The size of its largest element; many trials are held against one run of the whole unit."""
    known = wanted.__dict__.get("_scale")
    if known is None:
        known = wanted.__dict__["_scale"] = _largest(wanted)
    return float(known)


def are_alike(found: Tensor, wanted: Tensor, tolerance: float, *, whole: Tensor) -> bool:
    """Whether nothing differs, as for `difference_of`; for floating values of one shape."""
    limit = tolerance * max(_scale_of(whole), 1e-3)
    return not wanted.numel() or _distance([found], wanted, limit) <= limit


def _distance(addends: Sequence[Tensor], wanted: Tensor, enough: float = math.inf) -> float:
    """The largest distance of an element, or one that is more than enough; no number if one of them is none."""
    tensors = [tensor.detach() for tensor in (*addends, wanted)]
    rows = max(1, _BLOCK * wanted.shape[0] // wanted.numel()) if wanted.dim() else 1
    if not wanted.dim() or rows >= len(wanted):
        return _largest(sum(tensors[1:-1], tensors[0]) - tensors[-1])
    largest = 0.0
    for block in zip(*(tensor.split(rows) for tensor in tensors), strict=True):
        distance = _largest(sum(block[1:-1], block[0]) - block[-1])
        if math.isnan(distance) or distance > enough:
            return distance
        largest = max(largest, distance)
    return largest


def _largest(values: Tensor) -> float:
    values = values.detach()
    low, high = torch.aminmax(torch.view_as_real(values) if values.is_complex() else values)
    # A number that is none is passed on by these.
    return float(torch.maximum(-low, high))
