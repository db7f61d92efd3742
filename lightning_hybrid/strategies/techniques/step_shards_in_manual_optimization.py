"""ZeRO with manual optimization: optimizers that the module calls itself step local shards."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lightning_hybrid.parts.shard_and_unshard_parameters import AxisSharding
from lightning_hybrid.strategies.options.strategy_options import Options
from lightning_hybrid.zero.optimizer_states.sharded_manual_optimizer_step import ShardedStep
from lightning_hybrid.zero.optimizer_states.try_optimizer_step import can_step_shards, combines_parameters


def can_shard_manual_steps(module: pl.LightningModule, options: Options) -> bool:
    """Whether replicas shard the optimizer steps of manual optimization, if nothing else is sharded."""
    is_elsewhere = bool(options.offloaded.keys() - {"optimizer_states"}) or options.save_distributed_checkpoint
    return options.zero_stage in (1, 2) and not module.automatic_optimization and not is_elsewhere


def describe_manual_zero(stage: int, size: int) -> str:
    """Return the table line of ZeRO with manual optimization."""
    states = f"optimizer states sharded over {size} replicas"
    return f"ZeRO-{stage}, manual optimization: {states}, gradients averaged in full"


def step_manual_shards(
    optimizers: Sequence[Optimizer], module: nn.Module, shardings: Sequence[AxisSharding], until: contextlib.ExitStack
) -> list[Optimizer]:
    """Let optimizers that the module calls itself step local shards of parameters, which are full meanwhile.

    Returns the optimizers that combine or need full parameters: they step those on every rank.
    """
    named = dict(module.named_parameters())
    full = []
    for optimizer in optimizers:
        if combines_parameters(optimizer) or not can_step_shards(optimizer):
            full.append(optimizer)
            continue
        for sharding in shardings:  # of experts, over other ranks: the step of one runs in that of the other
            placements = {id(named[name]): placement for name, placement in sharding.placements.items()}
            until.callback(ShardedStep(optimizer, sharding.group, placements).close)
    return full


def shard_optimizer_states(
    optimizers: Sequence[Optimizer], ranks: dist.ProcessGroup, until: contextlib.ExitStack
) -> list[ShardedStep]:
    """Shard the states of optimizers that the module calls itself, but of those that step parameters in full."""
    steps = []
    for optimizer in optimizers:
        if combines_parameters(optimizer) or not can_step_shards(optimizer):
            rank_zero_warn(
                f"{type(optimizer).__name__} may read full parameters, or several, so each replica keeps all of its"
                " states; zero_stage=3 shards them between steps"
            )
            continue
        steps.append(ShardedStep(optimizer, ranks))
        until.callback(steps[-1].close)
    return steps
