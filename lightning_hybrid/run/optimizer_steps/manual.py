"""Optimizers that the user's step calls, where tensor ranks have shards of the parameters that they step.

A step that calls its optimizers itself finds parameters and gradients that ZeRO has gathered, of which each tensor rank
still has its shard only. So what such an optimizer needs of a parameter is gathered over tensor ranks alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from torch import nn
from torch.optim import Optimizer

from lightning_hybrid.errors import LayoutError
from lightning_hybrid.mesh import Mesh
from lightning_hybrid.optim.trust_ratio import TrustRatioOptimizer
from lightning_hybrid.params.reads.agreement import HookAgreement
from lightning_hybrid.params.reads.hooks import HookReads
from lightning_hybrid.params.shards import AxisSharding, LocalShards
from lightning_hybrid.run.optimizer_steps.full_steps import sum_norms_over_shards
from lightning_hybrid.strategies.user_code.optimizers import (
    adopt_states,
    reads_of_optimizers,
    watch_step,
)


def read_full_parameters_in_manual_steps(
    optimizers: Sequence[Optimizer],
    module: nn.Module,
    parts: LocalShards,
    shardings: Sequence[AxisSharding],
    agreement: HookAgreement,
    is_full: Callable[[], bool],
    until: ExitStack,
) -> list[Optimizer]:
    """Let optimizers that combine parameters, or need all elements of one, read full parameters in their steps.

    Args:
        optimizers: That the user's step calls, without those that owners step.
        module: The user's.
        parts: Local shards between steps.
        shardings: Those of ``parts`` that remain while the user's step runs: over tensor ranks and experts.
        agreement: By which ranks find out that they do not read the same.
        is_full: Whether parameters are full on every rank now.
        until: Restores the optimizers when it is closed.

    Returns:
        Those that read full parameters over other ranks than those of ZeRO.
    """
    if not parts:
        return []
    named = dict(module.named_parameters())
    at_rest = HookReads(named, parts, agreement)
    found = list(reads_of_optimizers(optimizers, at_rest))
    for optimizer in found:
        adopt_states(optimizer, at_rest)
    if not shardings:
        return []
    in_step = HookReads(named, LocalShards(module, shardings), agreement)
    for optimizer, reads in reads_of_optimizers(found, in_step).items():
        until.callback(watch_step(optimizer, reads, lambda: not is_full()))
    return found


def sum_norms_in_manual_steps(
    optimizers: Sequence[Optimizer],
    module: nn.Module,
    shardings: Sequence[AxisSharding],
    mesh: Mesh,
    is_full: Callable[[], bool],
    until: ExitStack,
) -> None:
    """Let LAMB and LARS add up norms over tensor ranks, where ZeRO has gathered the shards of these.

    Raises:
        LayoutError: Experts are sharded over ranks.
    """
    for optimizer in optimizers:
        if not isinstance(optimizer, TrustRatioOptimizer) or not shardings:
            continue
        if any(sharding.axis != "tp" for sharding in shardings):
            raise LayoutError(
                f"{type(optimizer).__name__} takes norms of full parameters, and in manual optimization with zero_stage"
                f" and expert_parallel_size={mesh.layout.expert_parallel_size} no rank has those of experts; set"
                " expert_parallel_size=1, or zero_stage=0",
                entry="manual-trust-ratio",
            )
        sum_norms_over_shards(optimizer, mesh, LocalShards(module, shardings), is_full, until, axis="tp")
