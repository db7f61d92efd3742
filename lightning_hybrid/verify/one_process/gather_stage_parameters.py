"""Parameters of all pipeline stages, gathered on the first rank while it runs a step by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from lightning_hybrid.collectives.make_tensor_sendable import on_group_device
from lightning_hybrid.pipeline.stages.stages_of_parameters_and_buffers import StagePlan
from lightning_hybrid.step.standins.absent_tensors import drop, fill, is_absent


@contextlib.contextmanager
def full_parameters_on_first_rank(root: nn.Module, plan: StagePlan | None, group: dist.ProcessGroup) -> Iterator[None]:
    """Context in which the first rank of a pipeline has the content of all parameters; collective over its ranks.

    Args:
        root: The user's module.
        plan: The owner ranks of all parameters; None without stages.
        group: The ranks of the pipeline.
    """
    filled = []
    if plan is not None and plan.first is not None:
        for name, parameter in root.named_parameters():
            owner = plan.ranks_of(name)[0]
            if owner == 0:
                continue
            if plan.rank == owner:
                dist.send(on_group_device(parameter.detach().contiguous(), group), group=group, group_dst=0)
            elif plan.rank == 0:
                content = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
                dist.recv(content, group=group, group_src=owner)
                fill(parameter, nn.Parameter(content, requires_grad=parameter.requires_grad))
                filled.append(parameter)
    try:
        yield
    finally:
        for parameter in filled:
            assert not is_absent(parameter)
            drop(parameter)
