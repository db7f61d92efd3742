"""Parameters and buffers of a stage plan: dropped where other ranks own them, and broadcast from their owners."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.collectives.tensors import as_sendable, broadcast_buffer
from lightning_hybrid.pipeline.stages.recording_partitioned_into_stages import TraceVariant
from lightning_hybrid.pipeline.stages.stages_of_parameters_and_buffers import StagePlan
from lightning_hybrid.step.module_state.attributes import compute_weights
from lightning_hybrid.step.standins.tensors import drop, fill, is_absent


def drop_remote_parameters(plan: StagePlan) -> None:
    """Free the parameters that other ranks own; the objects stay, as absent tensors."""
    for name, parameter in plan.root.named_parameters():
        if plan.rank not in plan.ranks_of(name) and not is_absent(parameter):
            drop(parameter)


def drop_absent_in_copy(root: nn.Module, copy: nn.Module) -> None:
    """Free the parameters of a copy of the module that are absent in the module itself."""
    for original, copied in zip(root.parameters(), copy.parameters(), strict=True):
        if is_absent(original) and not is_absent(copied):
            drop(copied)


def unshard_parameters(plan: StagePlan, copy: nn.Module | None = None, kept_on: torch.device | None = None) -> None:
    """Broadcast all parameters and buffers from their owners to every rank; collective over the pipeline.

    Args:
        plan: The owners.
        copy: A copy of the module with the same absent parameters; the module itself if None.
        kept_on: Where parameters of other ranks stay once they have arrived; where they were if None.
    """
    if plan.num_ranks == 1 or not plan.is_partitioned:
        return
    device = plan.randomness.device
    for name, parameter in (plan.root if copy is None else copy).named_parameters():
        owners = plan.ranks_of(name)
        if len(owners) == plan.num_ranks:
            continue
        here = not is_absent(parameter)
        content = parameter.detach() if here else torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        content = content.to(device).contiguous()
        dist.broadcast(as_sendable(content), group=plan.group, group_src=owners[0])
        if is_absent(parameter):
            content = content.to(kept_on or parameter.device)
            fill(parameter, nn.Parameter(content, requires_grad=parameter.requires_grad))
    for buffer, owner in buffer_owners(plan, copy):
        broadcast_buffer(buffer, owner, plan.group, device)
    compute_weights(plan.root if copy is None else copy)


def buffer_owners(plan: StagePlan, copy: nn.Module | None = None) -> list[tuple[Tensor, int]]:
    """Buffers, of any shape, that are valid on one rank only (inside units, and tracked ones); each with this rank."""
    if plan.first is None:
        return []
    if copy is not None:
        ranks = buffer_ranks(plan)
        pairs = zip(plan.root.buffers(), copy.buffers(), strict=True)
        return [(copied, ranks[id(buffer)]) for buffer, copied in pairs if id(buffer) in ranks]
    owners = {id(buffer): (buffer, plan.rank_of(stage)) for buffer, stage in plan.unit_buffers()}
    for name, buffer in plan.root.named_buffers():
        if name in plan.tracked_buffers:
            owners[id(buffer)] = buffer, plan.ranks_of(name)[0]
    return list(owners.values())


def buffer_ranks(plan: StagePlan, copy: nn.Module | None = None) -> dict[int, int]:
    """Pipeline rank on which a buffer (of a copy) is valid, by id of the buffer; others are valid everywhere."""
    return {id(buffer): owner for buffer, owner in buffer_owners(plan, copy)}


def repeated_buffers(plan: StagePlan) -> list[tuple[dict[str, Any], str]]:
    """The buffers that every stage writes, since no value of the model enters them: their dicts and keys."""
    if plan.stages_per_rank == 1 or plan.first is None:
        return []
    inside = {id(buffer) for unit in plan.first.recording.units.values() for buffer in unit.buffers()}
    return [
        (module._buffers, member)
        for fqn, module in plan.root.named_modules()
        for member, buffer in module._buffers.items()
        if id(buffer) not in inside and (f"{fqn}.{member}" if fqn else member) not in plan.tracked_buffers
    ]


def broadcast_buffers(plan: StagePlan, variants: Iterable[TraceVariant]) -> None:
    """Broadcast tracked buffers after a step to the other stages that read them; collective over the pipeline."""
    if not plan.tracked_buffers or plan.num_ranks == 1:
        return
    buffers = dict(plan.root.named_buffers())
    for name in sorted(plan.tracked_buffers):
        if any(len(variant.assignment.holders.get(name, ())) > 1 for variant in dict.fromkeys(variants)):
            broadcast_buffer(buffers[name], plan.ranks_of(name)[0], plan.group, plan.randomness.device)
