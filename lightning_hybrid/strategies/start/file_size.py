"""A warning before a run whose checkpoints, as single files, take much of the memory of the rank that gathers them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lightning_hybrid.memory.free import host_memory
from lightning_hybrid.optimizers.trial import StateSizes
from lightning_hybrid.step.standins.tensors import full_shape
from lightning_hybrid.text import sized

_SHARE = 0.2  # of the host's memory


def warn_of_large_single_file(trainer: Any, module: nn.Module, optimizers: Sequence[Optimizer], **sizes: bool) -> None:
    """Warn if a checkpoint of full parameters and states exceeds a fifth of the host's memory; on the first rank.

    ``sizes`` are arguments of `StateSizes`.
    """
    saving = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    if not saving:
        return
    needed = sum(math.prod(full_shape(t)) * t.element_size() for t in (*module.parameters(), *module.buffers()))
    what = "parameters"
    if not all(callback.save_weights_only for callback in saving):
        needed += _state_bytes(module, [StateSizes(optimizer, **sizes) for optimizer in optimizers])
        what = "parameters and optimizer states"
    memory = host_memory()
    if needed > _SHARE * memory:
        rank_zero_warn(
            f"{type(saving[0]).__name__} saves a single file, for which the first rank gathers {sized(needed)} of"
            f" {what}: {needed / memory:.0%} of the {sized(memory)} of memory of its host. Set"
            " Hybrid3DStrategy(save_distributed_checkpoint=True): each rank then writes its own shards"
        )


def _state_bytes(module: nn.Module, optimizers: Sequence[StateSizes]) -> int:
    """Return the bytes of all optimizer states of full parameters, as far as they are known."""
    total = 0
    for sizes in optimizers:
        trained = [p for p in module.parameters() if p.requires_grad and sizes.steps(p)]
        total += sum(sizes.nbytes(p, full_shape(p)) or 0 for p in trained)
    return total
