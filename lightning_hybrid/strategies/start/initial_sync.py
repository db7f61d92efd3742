"""Initial synchronization of ranks: weights, generators, seed, and what building optimizers writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_hybrid.collectives.tensors import as_sendable
from lightning_hybrid.mesh import Mesh
from lightning_hybrid.randomness.generators import GeneratorStates
from lightning_hybrid.step.standins.tensors import is_absent
from lightning_hybrid.strategies.world.ranks import RankWorld


def synchronize_start(
    module: nn.Module, mesh: Mesh, data_rank: int, device: torch.device, copies: Sequence[nn.Module] = ()
) -> int:
    """Broadcast the weights of rank 0, and in each replica the generators of its first rank; return the common seed.

    Without ``seed_everything`` (or where initialisation depends on hash order) each process has drawn its own.
    ``copies`` of the module, made before, begin with the same weights. The seed keys random numbers.
    """
    seed = torch.default_generator.initial_seed() & 0x7FFFFFFF
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(
                f"{name} of a lazy layer has no shape before the first batch, and weights are synchronized and given to"
                " optimizers before it; call the module on a batch in configure_model, or state the layer's sizes"
            )
    if mesh.layout.world_size == 1:
        return seed
    broadcast_weights((module, *copies), device)
    states = [GeneratorStates(device)]
    dist.broadcast_object_list(states, group=mesh.group("replica"), group_src=0)
    seed_box = [seed]
    dist.broadcast_object_list(seed_box, src=0)
    states[0].on(device).restore()
    return seed_box[0]


def broadcast_weights(roots: Sequence[nn.Module], device: torch.device) -> None:
    """Broadcast the parameters and buffers of full modules from rank 0; collective over all ranks."""
    tensors = [t for root in roots for t in (*root.parameters(), *root.buffers())]
    # What is built empty, and so is not here, will be the first rank's too.
    _broadcast([tensor.detach() for tensor in tensors if not is_absent(tensor) and not tensor.is_meta], device)


@torch.inference_mode()  # tensors made in this mode may be written in no other
def _broadcast(tensors: Sequence[Tensor], device: torch.device) -> None:
    """Broadcast tensors from rank 0; small ones of one dtype travel together."""
    together: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() <= _SMALL:
            together.setdefault(tensor.dtype, []).append(tensor)
            continue
        content = tensor.to(device).contiguous()
        dist.broadcast(as_sendable(content), src=0)
        if content.data_ptr() != tensor.data_ptr():
            tensor.copy_(content)
    for same in together.values():
        for start in range(0, len(same), _MOST_TOGETHER):
            group = same[start : start + _MOST_TOGETHER]
            content = torch.cat([tensor.reshape(-1).to(device) for tensor in group])
            dist.broadcast(as_sendable(content), src=0)
            for tensor, values in zip(group, content.split([tensor.numel() for tensor in group]), strict=True):
                tensor.copy_(values.view(tensor.shape))


# Numbers of elements, and of tensors: at most 64 MiB of 32-bit numbers are copied at a time.
_SMALL = 1 << 16
_MOST_TOGETHER = 256


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
