"""One message between each pair of ranks of a group that carries tensors of any shapes and dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_hybrid.collectives.make_tensor_sendable import on_group_device

_ALIGNMENT = 16  # bytes; a dtype's view of a message begins at a multiple of its size


class TensorSpec(NamedTuple):
    """Shape and dtype of a tensor that arrives."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def exchange_tensors(
    sent: Sequence[list[Tensor]], arriving: Sequence[Sequence[TensorSpec]], group: ProcessGroup
) -> list[list[Tensor]]:
    """Send tensors to each rank of a group, and receive those that each rank sends; one all-to-all, collective.

    Args:
        sent: For each rank of the group, dense tensors of any shapes and dtypes, on one device. The lists are emptied
            once the message has their content.
        arriving: For each rank of the group, what it sends to this one.
        group: The ranks.

    Returns:
        For each rank of the group, the tensors of the given shapes, on the group's device; views of one message.
    """
    parts = [_padded_bytes(tensor) for tensors in sent for tensor in tensors]
    message = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
    out_bytes = [sum(_padded_size(TensorSpec(tuple(t.shape), t.dtype)) for t in tensors) for tensors in sent]
    parts.clear()
    for tensors in sent:
        tensors.clear()
    sizes = [[_padded_size(spec) for spec in specs] for specs in arriving]
    message = on_group_device(message, group)
    received = message.new_empty(sum(map(sum, sizes)))
    dist.all_to_all_single(received, message, list(map(sum, sizes)), out_bytes, group=group)
    found: list[list[Tensor]] = []
    start = 0
    for specs, padded in zip(arriving, sizes, strict=True):
        found.append([])
        for spec, size in zip(specs, padded, strict=True):
            nbytes = torch.Size(spec.shape).numel() * spec.dtype.itemsize
            found[-1].append(received[start : start + nbytes].view(spec.dtype).view(spec.shape))
            start += size
    return found


def _padded_bytes(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    missing = -len(flat) % _ALIGNMENT
    return torch.nn.functional.pad(flat, (0, missing)) if missing else flat


def _padded_size(spec: TensorSpec) -> int:
    nbytes = torch.Size(spec.shape).numel() * spec.dtype.itemsize
    return nbytes + -nbytes % _ALIGNMENT
