"""ZeRO with manual optimization: optimizers that the module calls itself step local shards."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from lightning_hybrid.optimizers.trial import can_step_shards, combines_parameters
from lightning_hybrid.parts.shard_and_unshard_parameters import AxisSharding
from lightning_hybrid.zero.manual_step import ShardedStep


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
