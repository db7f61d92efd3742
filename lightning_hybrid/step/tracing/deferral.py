"""Whether a split backward computes the product for a weight later, or a linear may do so at any time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Protocol

from torch import Tensor


class Deferral(Protocol):
    """One that may defer products for weights."""

    def can_defer(self, input: Tensor, weight: Tensor) -> bool:
        """Whether a backward can defer the gradient of a linear's weight (out, in), whose input is (..., in)."""


_active: list[Deferral] = []  # one at most


@contextlib.contextmanager
def active(deferral: Deferral) -> Iterator[None]:
    """Ask this one inside, where it replaces the linear of torch."""
    _active.append(deferral)
    try:
        yield
    finally:
        _active.remove(deferral)


def deferrals(input: Tensor, weight: Tensor) -> Sequence[Deferral]:
    """Those that can defer the gradient of a linear's weight (out, in), whose input is (..., in)."""
    return [each for each in _active if each.can_defer(input, weight)]


def computes_now(input: Tensor, weight: Tensor) -> bool:
    """Whether a split backward replaces the linear, of shapes as above, and does not defer its weight's gradient."""
    return bool(_active) and not deferrals(input, weight)
