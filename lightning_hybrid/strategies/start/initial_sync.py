"""Initial synchronization of ranks: weights, generators and seed; and guards on state dicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.collectives.sendable_tensors import as_sendable
from lightning_hybrid.mesh import Mesh
from lightning_hybrid.randomness.generator_snapshot import GeneratorStates
from lightning_hybrid.step.standins.absent_tensors import FULL_SHAPE, is_absent


def synchronize_start(
    module: nn.Module, mesh: Mesh, data_rank: int, device: torch.device, copies: Sequence[nn.Module] = ()
) -> int:
    """Broadcast the weights of rank 0, and in each replica the generators of its first rank; return the common seed.

    Without ``seed_everything`` (or where initialisation depends on hash order) each process has drawn its own.
    ``copies`` of the module, made before, begin with the same weights.

    Returns:
        A seed for keyed randomness, the same on every rank.
    """
    seed = torch.default_generator.initial_seed() & 0x7FFFFFFF
    if mesh.layout.world_size == 1:
        return seed
    tensors = [t for root in (module, *copies) for t in (*root.parameters(), *root.buffers())]
    # What is built empty, and so is not here, will be the first rank's too.
    _broadcast([tensor.detach() for tensor in tensors if not is_absent(tensor) and not tensor.is_meta], device)
    states = [GeneratorStates(device)]
    dist.broadcast_object_list(states, group=mesh.group("replica"), group_src=0)
    seed_box = [seed]
    dist.broadcast_object_list(seed_box, src=0)
    states[0].on(device).restore()
    return seed_box[0]


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
            for tensor, part in zip(group, content.split([tensor.numel() for tensor in group]), strict=True):
                tensor.copy_(part.view(tensor.shape))


# Numbers of elements, and of tensors: at most 64 MiB of 32-bit numbers are copied at a time.
_SMALL = 1 << 16
_MOST_TOGETHER = 256


def refuse_partial_state(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """A state dict hook that refuses to return parameters that are not on this rank."""
    del prefix, metadata
    if elsewhere := [name for name, value in state.items() if is_absent(value)] + _sharded_parameters(module):
        raise RuntimeError(
            f"{type(module).__name__}.state_dict() was called while {len(elsewhere)} of its parameters (such as"
            f" {elsewhere[0]!r}), or shards of them, are on other ranks; use trainer.save_checkpoint(...) or"
            " trainer.strategy.lightning_module_state_dict() on all ranks, or wait for the end of fit"
        )


def check_is_full(module: nn.Module, *_: Any) -> None:
    """Check that no run that failed has left this module sharded; also a state dict hook.

    Raises:
        RuntimeError: One has.
    """
    if elsewhere := missing_parameters(module):
        raise RuntimeError(
            f"a run that failed or was stopped has left this {type(module).__name__} sharded: {len(elsewhere)} of its"
            f" {sum(1 for _ in module.parameters())} parameters (such as {elsewhere[0]!r}), or shards of them, are not"
            " on this rank, and cannot be gathered any more; make a new module and load a checkpoint"
        )


def missing_parameters(module: nn.Module) -> list[str]:
    """FQNs of parameters that are absent or sharded on this rank."""
    named = module.named_parameters()
    absent = [name for name, parameter in named if is_absent(parameter)]
    return list(dict.fromkeys(absent + _sharded_parameters(module)))


def _sharded_parameters(module: nn.Module) -> list[str]:
    """FQNs of parameters of which this rank has a shard."""
    return [name for name, parameter in module.named_parameters() if FULL_SHAPE in parameter.__dict__]
