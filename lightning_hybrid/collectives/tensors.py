"""Tensors between the ranks of a group: in a form that its backend can send, exchanged, or broadcast by an owner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_hybrid.graph.step_graph import Value

_ALIGNMENT = 16  # bytes; a dtype's view of a message begins at a multiple of its size, and NCCL moves so many at once
# gloo's collectives do not support 16-bit integers and booleans, NCCL no complex numbers either.
_SENDABLE = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int8, torch.int32, torch.int64}
)

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size of an element
_DIGESTED = 1 << 22  # elements of a tensor that are digested together, in 8 bytes each
_FACTORS = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # of the generator SplitMix64


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


def aligned_numel(numel: int, dtype: torch.dtype) -> int:
    """Elements of a row of a message, and those that fill its last 16 bytes: NCCL moves other rows in small parts."""
    return -(-numel * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT // dtype.itemsize


# By the names of torch 2.13 and of those before, looked up at the call: a run that is recorded replaces them.
def all_gather_single(output: Tensor, tensor: Tensor, group: ProcessGroup, *, async_op: bool = False) -> Any:
    """All-gather flat tensors of one length into one, in the order of the ranks; with ``async_op`` returns the work."""
    run = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return run(output, tensor, group=group, async_op=async_op)


def reduce_scatter_single(output: Tensor, tensor: Tensor, group: ProcessGroup) -> None:
    """Sum flat tensors over the ranks; each gets its share of equal length, in the order of the ranks."""
    (getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor)(output, tensor, group=group)


class TensorSpec(NamedTuple):
    """Shape and dtype of a tensor that arrives."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def exchange_tensors(
    sent: Sequence[list[Tensor]], arriving: Sequence[Sequence[TensorSpec]], group: ProcessGroup
) -> list[list[Tensor]]:
    """Send tensors to each rank of a group, and receive tensors from each rank; one all-to-all, collective.

    Dense tensors of any shapes are sent; their lists are emptied once the message has their content.

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


def broadcast_tensor(
    value: Value, content: Tensor | None, source: int, group: dist.ProcessGroup, device: torch.device
) -> Tensor:
    """Broadcast a tensor of the recorded shape, or of any shape if that is dynamic, from a pipeline rank."""
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


@torch.no_grad()
def digest_of_bits(tensor: Tensor) -> Tensor:
    """A number on the tensor's device, of shape (), equal for equal bits in equal places, almost surely for no others.

    The host waits for nothing.
    """
    real = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    bits = real.contiguous().view(_BITS[real.element_size()]).reshape(-1)
    total = bits.new_zeros((), dtype=torch.int64)
    for start in range(0, len(bits), _DIGESTED):
        part = bits[start : start + _DIGESTED].to(torch.int64)
        place = torch.arange(start, start + len(part), device=part.device)
        mixed = (part + place * _FACTORS[0]) * _FACTORS[1]  # overflows wrap around
        mixed = (mixed ^ (mixed >> 31)) * _FACTORS[2]  # no longer linear in the place
        total += (mixed ^ (mixed >> 29)).sum()
    return total


Map = Callable[[Tensor], Tensor]


class LinearMap(torch.autograd.Function):
    """Applies a linear map; the backward applies its adjoint, so that gradients can be differentiated again."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, run: Map, adjoint: Map) -> Tensor:
        """The result of the map, whose shape may differ."""
        ctx.maps = adjoint, run
        return run(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """The gradient, of the shape of the input."""
        return LinearMap.apply(grad, *ctx.maps), None, None
