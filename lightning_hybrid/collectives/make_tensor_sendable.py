"""Tensors in a form that the backend of a process group can send."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

# gloo's collectives do not support 16-bit integers and booleans, NCCL no complex numbers either.
_SENDABLE = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int8, torch.int32, torch.int64}
)


def as_sendable(tensor: Tensor) -> Tensor:
    """The contiguous tensor itself, or its flat bytes if some backend does not support its dtype; for no reductions."""
    return tensor if tensor.dtype in _SENDABLE else tensor.reshape(-1).view(torch.uint8)


def on_group_device(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Move a tensor of any shape to a device that the backend of ``group`` supports: an offloaded one to NCCL's."""
    types = [device.type for device in group._device_types]
    return tensor if not types or tensor.device.type in types else tensor.to(types[0])


def group_device(group: ProcessGroup) -> torch.device:
    """The device on which this rank receives what comes over a group: its own GPU, or the host."""
    types = [device.type for device in group._device_types]
    return torch.device("cpu" if "cpu" in types or not types else types[0])
