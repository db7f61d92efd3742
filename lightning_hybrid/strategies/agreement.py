"""What all ranks must agree on before a run, and what must not happen while its module is in parts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import numpy
import torch
import torch.distributed as dist
from torch import nn

from lightning_hybrid.mesh import Mesh
from lightning_hybrid.step.absent import WHOLE_SHAPE, is_absent


def agree_on_start(
    module: nn.Module, mesh: Mesh, data_rank: int, device: torch.device, copies: Sequence[nn.Module] = ()
) -> int:
    """Give all ranks the weights of rank 0, and all ranks of a replica the generators of its first rank.

    Without ``seed_everything`` (or where initialisation depends on hash order) each process has drawn its own.

    Args:
        module: The user's.
        mesh: The ranks.
        data_rank: Of this rank.
        device: Of this rank.
        copies: Of the module, made before; they begin with the same weights.

    Returns:
        A seed for keyed randomness, the same on every rank.
    """
    seed = torch.default_generator.initial_seed() & 0x7FFFFFFF
    if mesh.layout.world_size == 1:
        return seed
    for tensor in [t for root in (module, *copies) for t in (*root.parameters(), *root.buffers())]:
        if is_absent(tensor) or tensor.is_meta:  # built empty: what it will be is rank 0's too
            continue
        content = tensor.detach().to(device).contiguous()
        raw = content.view(torch.uint8) if content.dtype is torch.bool and content.dim() else content
        dist.broadcast(raw, src=0)
        if content.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(content)
    states: list[Any] = [(seed, random.getstate(), numpy.random.get_state(), torch.get_rng_state())]
    dist.broadcast_object_list(states, group=mesh.group("replica"), group_src=0)
    seed_box = [seed]
    dist.broadcast_object_list(seed_box, src=0)
    _, python_state, numpy_state, torch_state = states[0]
    random.setstate(python_state)
    numpy.random.set_state(numpy_state)
    torch.set_rng_state(torch_state)
    return seed_box[0]


def check_gathered(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """A state dict hook that refuses to give out parameters that are not there."""
    del prefix, metadata
    absent = [name for name, value in state.items() if is_absent(value)]
    absent += [name for name, parameter in module.named_parameters() if WHOLE_SHAPE in parameter.__dict__]
    if absent:
        raise RuntimeError(
            f"{type(module).__name__}.state_dict() was called while {len(absent)} of its parameters (such as"
            f" {absent[0]!r}), or parts of them, are on other ranks; use trainer.save_checkpoint(...) or"
            " trainer.strategy.lightning_module_state_dict() on all ranks, or wait for the end of fit"
        )


def whole_again_callback(strategy: Any) -> pl.Callback:
    """A callback that comes before the user's: at the end of training their hooks find the whole module."""

    class WholeAgain(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            strategy.make_whole()

    return WholeAgain()
