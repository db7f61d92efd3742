"""Optimizers that see all elements of a parameter: stepped in full at owners, or with norms over all shards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid.collectives.tensors import on_group_device
from lightning_hybrid.mesh import Mesh
from lightning_hybrid.optim.trust_ratio import TrustRatioOptimizer
from lightning_hybrid.optimizers.owner_step import OwnerStep
from lightning_hybrid.optimizers.trial import steps_full_parameters
from lightning_hybrid.params.shards import LocalShards
from lightning_hybrid.patching import replace


def connect_full_parameter_steps(
    optimizers: Sequence[Optimizer],
    module: nn.Module,
    mesh: Mesh,
    parts: LocalShards,
    is_full: Callable[[], bool],
    until: contextlib.ExitStack,
) -> list[Optimizer]:
    """Let optimizers that need all elements of each parameter have them, until a stack is closed.

    ``is_full`` tells whether parameters are full on every rank now. Returns those that step full parameters at owners.
    """
    if not parts:
        return []
    names = {id(p): name for name, p in module.named_parameters()}
    stepped_at_owners = []
    for optimizer in optimizers:
        if isinstance(optimizer, TrustRatioOptimizer):
            sum_norms_over_shards(optimizer, mesh, parts, is_full, until)
        elif steps_full_parameters(optimizer):
            until.callback(OwnerStep(optimizer, parts, names, is_full).close)
            name = type(optimizer).__name__
            stepped_at_owners.append(optimizer)
            rank_zero_info(f"{name} needs full parameters: each is gathered to one rank, stepped there and scattered")
    return stepped_at_owners


def sum_norms_over_shards(
    optimizer: TrustRatioOptimizer,
    mesh: Mesh,
    parts: LocalShards,
    is_full: Callable[[], bool],
    until: contextlib.ExitStack,
    *,
    axis: str = "holders",
) -> None:
    """Let an optimizer add up norms over the ranks of ``axis``, which hold ``parts``, each element once."""

    def counted_slices(p: Tensor, local: Tensor) -> list[Tensor]:
        return [local] if is_full() else parts.first_owned_slices(p, local)

    def sum_over_shards(squares: Tensor) -> Tensor:
        if is_full():
            return squares
        total = on_group_device(squares, mesh.group(axis))
        return mesh.all_reduce(total, axis).to(squares.device)

    why = "norms of full parameters"
    until.callback(replace(optimizer, "counted_slices", counted_slices, reason=why))
    until.callback(replace(optimizer, "sum_over_shards", sum_over_shards, reason=why))
