"""Examples whose positions differ so much that a layer of local positions would decide otherwise than the full layer.

Random numbers of one scale reach few thresholds: `torch.where(h.abs().max() > 50, h / 2, h)` is `h` on each rank and in
the full layer, until an outlier comes. In these examples one rank has an outlier, one has almost zeros, or all
positions are equal, as where all tokens go to one expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.equivalence.difference_from_full_unit import difference_of
from lightning_hybrid.tensor.trial.example_inputs import Example

_TINY = 1e-4  # its effects are above the tolerance, beside numbers of ordinary size
_LARGE = {torch.float64: 1e3, torch.float32: 10.0}  # that scores of attention are still exact enough
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}
_LEAST = 1e-6  # the smallest scale of a position


def outlier_examples(example: Example, leaf_index: int, dim: int) -> Iterator[tuple[str, Example]]:
    """Yields examples of the same shapes, each with its description.

    Args:
        example: The example of a unit.
        leaf_index: Index of the sequence among the arguments, a floating tensor of any shape.
        dim: Its dim of positions.
    """
    leaf = example.leaves[leaf_index]
    length = leaf.shape[dim]
    shape = [length if other == dim else 1 for other in range(leaf.dim())]
    large = _LARGE.get(leaf.dtype, 10.0)
    scales = torch.ones(length, dtype=leaf.dtype)
    scales[length // 2 :], scales[0] = _TINY, large
    invalid = torch.ones(length, dtype=leaf.dtype)
    invalid[-1] = torch.inf
    with torch.no_grad():
        changed = {
            "an outlier in its first position": leaf * scales.view(shape),
            "an outlier in its last position": leaf * scales.flip(0).view(shape),
            "infinite numbers in its last position": leaf * invalid.view(shape),
            "equal positions": leaf.narrow(dim, 0, 1).expand_as(leaf).clone(),
        }
    for text, value in changed.items():
        leaves = list(example.leaves)
        leaves[leaf_index] = value.requires_grad_(leaf.requires_grad)
        yield text, replace(example, leaves=tuple(leaves))


def difference_on_outliers(found: Any, wanted: Any, length: int, dim: int) -> str | None:
    """The difference between two values where both are finite, each position by its own scale; or None.

    Args:
        found: A value of a sharded run; a tensor of any shape, or another object.
        wanted: The same value of the full unit.
        length: Number of positions of the sequence.
        dim: Its dim of positions.
    """
    if not isinstance(found, Tensor) or not isinstance(wanted, Tensor) or found.shape != wanted.shape:
        return difference_of(found, wanted, 0.0)
    if not wanted.is_floating_point():
        return difference_of(found, wanted, 0.0)
    tolerance = _TOLERANCES.get(wanted.dtype, 5e-2)
    is_finite = found.isfinite() & wanted.isfinite()
    found, wanted = (torch.where(is_finite, value.detach(), 0.0) for value in (found, wanted))
    if wanted.dim() > dim and wanted.shape[dim] == length:
        others = [other for other in range(wanted.dim()) if other != dim]
        scale = (wanted.abs().amax(others, keepdim=True) if others else wanted.abs()).clamp(min=_LEAST)
        found, wanted = found / scale, wanted / scale
    return difference_of(found, wanted, tolerance)
