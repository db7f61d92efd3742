"""Initial synchronization of ranks: weights, generators and seed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.collectives.make_tensor_sendable import as_sendable
from lightning_hybrid.mesh import Mesh
from lightning_hybrid.randomness.generator_snapshot import GeneratorStates
from lightning_hybrid.step.standins.absent_tensors import is_absent


def synchronize_start(
    module: nn.Module, mesh: Mesh, data_rank: int, device: torch.device, copies: Sequence[nn.Module] = ()
) -> int:
    """Broadcast the weights of rank 0, and in each replica the generators of its first rank; return the common seed.

    Without ``seed_everything`` (or where initialisation depends on hash order) each process has drawn its own.
    ``copies`` of the module, made before, begin with the same weights. The seed keys random numbers.
    """
    seed = torch.default_generator.initial_seed() & 0x7FFFFFFF
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
