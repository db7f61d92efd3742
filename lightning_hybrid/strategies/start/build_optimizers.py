"""Optimizers are built while every rank has the full module, which `configure_optimizers` may group, read and run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from torch import nn

from lightning_hybrid.strategies.start.initial_sync import broadcast_weights
from lightning_hybrid.strategies.world.rank_world_and_collectives import RankWorld


def build_optimizers(
    trainer: pl.Trainer, module: pl.LightningModule, world: RankWorld, copies: Sequence[nn.Module]
) -> None:
    """Let the strategy of a trainer build optimizers of a full module; collective.

    Values that `configure_optimizers` writes, which may be computed from the batches of one replica, become those of
    the first rank on all. ``copies`` of the module had its weights.
    """
    strategy: Any = trainer.strategy
    before = _states(module)
    strategy.setup_optimizers(trainer)
    for parameter in module.parameters():
        parameter.grad = None  # as the first batch clears them; its shard has another shape
    if world.layout.world_size > 1 and world.decide(_states(module) != before, all_ranks=False):
        with world.as_launcher():
            broadcast_weights((module, *copies), world.device)


def _states(module: nn.Module) -> list[tuple[int, int]]:
    """What differs where a parameter or buffer was written."""
    return [(tensor._version, tensor.data_ptr()) for tensor in (*module.parameters(), *module.buffers())]
