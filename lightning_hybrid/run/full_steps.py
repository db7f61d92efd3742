"""Optimizers that see all elements of a parameter: stepped in full at owners, or with norms over all shards.

A step that calls its optimizers itself finds parameters and gradients that ZeRO has gathered, of which each tensor rank
still has its shard only. So what such an optimizer needs of a parameter is gathered over tensor ranks alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer

from lightning_hybrid.collectives.tensors import on_group_device
from lightning_hybrid.errors import LayoutError
from lightning_hybrid.optim.trust_ratio import TrustRatioOptimizer
from lightning_hybrid.optimizers.owner_step import OwnerStep
from lightning_hybrid.optimizers.trial import steps_full_parameters
from lightning_hybrid.params.shards import AxisSharding, LocalShards
from lightning_hybrid.patching import replace
from lightning_hybrid.run.build import RunOwner
from lightning_hybrid.run.run import Run


def step_full_parameters(run: Run, owner: RunOwner, optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """Let optimizers that need all elements of a parameter have them; return those that step it at owners."""
    if run.setting.is_manual and run.gathered_shardings:
        _sum_norms_in_manual_steps(run, owner, optimizers)
        return []
    if not run.parts or (run.setting.is_manual and run.guards is None):
        return []
    names = {id(p): name for name, p in run.setting.module.named_parameters()}
    stepped_at_owners = []
    for optimizer in optimizers:
        if isinstance(optimizer, TrustRatioOptimizer):
            _sum_norms_over_shards(run, owner, optimizer, run.parts, "holders")
        elif steps_full_parameters(optimizer):
            step = OwnerStep(optimizer, run.parts, names, owner.state)
            run.until_end.callback(step.close)
            name = type(optimizer).__name__
            stepped_at_owners.append(optimizer)
            rank_zero_info(f"{name} needs full parameters: each is gathered to one rank, stepped there and scattered")
    return stepped_at_owners


def shardings_in_step(run: Run) -> list[AxisSharding]:
    """The shardings that remain while a step of manual optimization runs: the others are gathered then."""
    gathered = run.gathered_shardings
    return [s for s in run.parts.shardings if not any(s is g for g in gathered)]


def read_in_manual_steps(run: Run, owner: RunOwner, optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """Let optimizers that combine parameters, or need all elements of one, read full parameters in their steps.

    Returns the optimizers that read parameters which are sharded over other ranks than replicas.
    """
    if not run.parts:
        return []
    from lightning_hybrid.params.reads.agreement import HookAgreement
    from lightning_hybrid.params.reads.hooks import HookReads
    from lightning_hybrid.strategies.user_code.optimizers import adopt_states, reads_of_optimizers, watch_step

    setting, shardings = run.setting, shardings_in_step(run)
    meet = partial(setting.world.rendezvous, compares=False)
    agreement = HookAgreement(run.mesh.group("holders"), setting.device, meet, "layer's")
    named = dict(setting.module.named_parameters())
    at_rest = HookReads(named, run.parts, agreement)
    found = list(reads_of_optimizers(optimizers, at_rest))
    for optimizer in found:
        adopt_states(optimizer, at_rest)
    if not shardings:
        return []
    in_step = HookReads(named, LocalShards(setting.module, shardings), agreement)
    for optimizer, reads in reads_of_optimizers(found, in_step).items():
        run.until_end.callback(watch_step(optimizer, reads, owner.state))
    return found


def _sum_norms_in_manual_steps(run: Run, owner: RunOwner, optimizers: Sequence[Optimizer]) -> None:
    """Let LAMB and LARS add up norms over tensor ranks, where ZeRO has gathered the shards of these.

    Raises:
        LayoutError: Experts are sharded over ranks.
    """
    shardings = shardings_in_step(run)
    for optimizer in optimizers:
        if not isinstance(optimizer, TrustRatioOptimizer) or not shardings:
            continue
        if any(sharding.axis != "tp" for sharding in shardings):
            raise LayoutError(
                f"{type(optimizer).__name__} takes norms of full parameters, and in manual optimization with zero_stage"
                f" and expert_parallel_size={run.mesh.layout.expert_parallel_size} no rank has those of experts; set"
                " expert_parallel_size=1, or zero_stage=0",
                entry="manual-trust-ratio",
            )
        _sum_norms_over_shards(run, owner, optimizer, LocalShards(run.setting.module, shardings), "tp")


def _sum_norms_over_shards(
    run: Run, owner: RunOwner, optimizer: TrustRatioOptimizer, parts: LocalShards, axis: str
) -> None:
    """Let an optimizer add up norms over the ranks of ``axis``, which hold ``parts``, each element once."""

    def counted_slices(p: Tensor, local: Tensor) -> list[Tensor]:
        return [local] if owner.state.is_full else parts.first_owned_slices(p, local)

    def sum_over_shards(squares: Tensor) -> Tensor:
        if owner.state.is_full:
            return squares
        total = on_group_device(squares, run.mesh.group(axis))
        return run.mesh.all_reduce(total, axis).to(squares.device)

    why = "norms of full parameters"
    run.until_end.callback(replace(optimizer, "counted_slices", counted_slices, reason=why))
    run.until_end.callback(replace(optimizer, "sum_over_shards", sum_over_shards, reason=why))
