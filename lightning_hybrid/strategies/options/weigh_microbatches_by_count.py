"""Weights of microbatches by a count of the user, such as unmasked tokens, instead of by samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lightning_hybrid.errors import BatchError
from lightning_hybrid.mesh import Mesh

MicrobatchWeight = Callable[[Any], float]


def weigh_by_count(microbatches: Sequence[Any], count: MicrobatchWeight, mesh: Mesh) -> list[float]:
    """Return weights that make the mean over microbatches and replicas the mean over what ``count`` counts.

    Gradients are averaged over the replicas afterwards, so a replica's weights sum to its share of the count times the
    number of replicas. ``count`` returns a number or a tensor of one element.

    Raises:
        BatchError: The full batch counts 0, or a count is negative or not finite.
    """
    counts = torch.tensor([float(count(microbatch)) for microbatch in microbatches], dtype=torch.float64)
    if not bool(torch.isfinite(counts).all()) or bool((counts < 0).any()):
        raise BatchError(
            f"microbatch_weight gave {counts.tolist()}; each must be a finite number of 0 or more",
            entry="microbatch-weight",
        )
    total = mesh.all_reduce(counts.sum().to(mesh.device_mesh.device_type), "data")
    if float(total) == 0:
        raise BatchError(
            f"microbatch_weight gave 0 for all {len(microbatches)} microbatches; nothing is left to average",
            entry="microbatch-weight",
        )
    weights: list[float] = (counts * mesh.size("data") / float(total)).tolist()
    return weights
