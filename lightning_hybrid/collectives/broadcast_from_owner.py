"""Broadcasts of tensors and buffers from the rank that has them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.collectives.make_tensor_sendable import as_sendable
from lightning_hybrid.graph.step_graph import Value


def broadcast_tensor(
    value: Value, content: Tensor | None, source: int, group: dist.ProcessGroup, device: torch.device
) -> Tensor:
    """Broadcast a tensor of the recorded shape, or of any shape if that is dynamic, from the pipeline rank ``source``.

    Args:
        value: Its record in the step graph; gives shape and dtype.
        content: The tensor on ``source``, None elsewhere.
        source: Pipeline rank.
        group: The ranks of one pipeline.
        device: The device on which the group communicates.
    """
    if group.size() == 1:
        assert content is not None
        return content.detach()
    shape: Sequence[int] = value.shape
    if value.dynamic:
        header = torch.zeros(9, dtype=torch.int64, device=device)
        if content is not None:
            header[0] = content.dim()
            header[1 : 1 + content.dim()] = torch.tensor(content.shape)
        dist.broadcast(header, group=group, group_src=source)
        dims, *sizes = header.tolist()
        shape = sizes[:dims]
    if content is None:
        content = torch.empty(shape, dtype=getattr(torch, value.dtype), device=device)
    content = content.detach().to(device).resolve_conj().resolve_neg().contiguous()
    dist.broadcast(as_sendable(content), group=group, group_src=source)
    return content.to(value.device) if value.device else content


def broadcast_buffer(buffer: Tensor, owner: int, group: dist.ProcessGroup, device: torch.device) -> None:
    """Broadcast a buffer, of one shape on all ranks, from the rank ``owner`` of a group; collective over it.

    ``device`` is the one on which the group communicates.
    """
    content = buffer.detach().to(device).contiguous()
    dist.broadcast(as_sendable(content), group=group, group_src=owner)
    if content.data_ptr() != buffer.data_ptr():
        buffer.detach().copy_(content)
