"""Exchange of Python objects between ranks, whose tensors are not pickled where they are.

`torch.distributed` pickles objects with their tensors: one on a GPU comes back on the *sender's* GPU, in each process
that receives it, and all bytes of the pickle are in device memory at once (pytorch/pytorch#76865, #150798). Here
tensors are taken out: small ones travel as bytes of host memory, and each large one in a message of its own.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_hybrid.collectives.tensors import TensorSpec, as_sendable, group_device, on_group_device

_LENGTH, _FIRST_BYTES = 8, 1 << 12  # of the first message of an exchange among all
_SMALL_BYTES = 1 << 16  # up to this size one message for all tensors is faster than one for each


def gather_on_first(value: Any, group: ProcessGroup) -> list[Any]:
    """Return the objects of all ranks of a group on its first, [] elsewhere; collective.

    Their tensors, of any shapes, arrive in host memory. One of them at a time is on the first rank's device.
    """
    packed, large = _pack(value)
    rows: list[Any] | None = [None] * group.size() if group.rank() == 0 else None
    dist.gather_object(packed, rows, group=group, group_dst=0)
    if rows is None:
        for tensor in large:
            dist.send(as_sendable(on_group_device(tensor, group).contiguous()), group=group, group_dst=0)
        return []
    found = [_unpack(packed, [tensor.cpu() for tensor in large])]
    for rank, row in enumerate(rows[1:], start=1):
        tensors = []
        for spec in row.large:
            content = torch.empty(spec.shape, dtype=spec.dtype, device=group_device(group))
            dist.recv(as_sendable(content), group=group, group_src=rank)
            tensors.append(content.cpu())
        found.append(_unpack(row, tensors))
    return found


def broadcast_object(value: Any, group: ProcessGroup | None = None, source: int = 0) -> Any:
    """Return the object of the rank ``source`` of a group, of the world if it is None, on each rank; collective.

    Its tensors, of any shapes, arrive in host memory.
    """
    group = group or dist.group.WORLD
    assert group is not None
    is_source = group.rank() == source
    packed, large = _pack(value) if is_source else (None, [])
    box = [packed]
    dist.broadcast_object_list(box, group=group, group_src=source)
    row = box[0]
    assert row is not None
    tensors = []
    for number, spec in enumerate(row.large):
        if is_source:
            content = on_group_device(large[number], group).contiguous()
        else:
            content = torch.empty(spec.shape, dtype=spec.dtype, device=group_device(group))
        dist.broadcast(as_sendable(content), group=group, group_src=source)
        tensors.append(content.cpu())
    return value if is_source else _unpack(row, tensors)


def gather_on_all(value: Any, group: ProcessGroup) -> list[Any]:
    """Return the objects of all ranks of a group on each, without tensors of a device; collective.

    One message for small objects: the host waits once for the device.
    """
    content = pickle.dumps(value)
    first = len(content).to_bytes(_LENGTH, "little") + content[:_FIRST_BYTES]
    rows = _gather_bytes(first, _LENGTH + _FIRST_BYTES, group)
    lengths = [int.from_bytes(row[:_LENGTH], "little") for row in rows]
    contents = [row[_LENGTH:] for row in rows]
    if max(lengths) > _FIRST_BYTES:
        rest = _gather_bytes(content[_FIRST_BYTES:], max(lengths) - _FIRST_BYTES, group)
        contents = [first + second for first, second in zip(contents, rest, strict=True)]
    return [pickle.loads(each[:length]) for each, length in zip(contents, lengths, strict=True)]


def _gather_bytes(content: bytes, size: int, group: ProcessGroup) -> list[bytes]:
    padded = torch.frombuffer(bytearray(content.ljust(size, b"\0")), dtype=torch.uint8)
    sent = on_group_device(padded, group)
    rows = [torch.empty_like(sent) for _ in range(group.size())]
    dist.all_gather(rows, sent, group=group)
    return [row.numpy().tobytes() for row in torch.stack(rows).cpu()]


class _Packed(NamedTuple):
    """A pickle in which tensors are numbers: small ones come with it, in host memory, and large ones later."""

    content: bytes
    small: dict[int, Tensor]
    large: list[TensorSpec]


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []  # they stay alive, so that no id is used twice
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        # Subclasses and sparse tensors are pickled: what they consist of comes here in turn.
        if type(obj) is not Tensor or obj.layout is not torch.strided or obj.is_quantized or obj.is_meta:
            return None
        if id(obj) not in self._numbers:
            self._numbers[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return self._numbers[id(obj)]


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, tensors: Sequence[Tensor]) -> None:
        super().__init__(io.BytesIO(content))
        self._tensors = tensors

    def persistent_load(self, pid: Any) -> Tensor:
        return self._tensors[pid]


def _pack(value: Any) -> tuple[_Packed, list[Tensor]]:
    """Pickle an object; the second result has its large tensors, where they are."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    small, large = {}, []
    for number, tensor in enumerate(pickler.tensors):
        content = tensor.detach().resolve_conj().resolve_neg()
        if content.nbytes <= _SMALL_BYTES:
            small[number] = content.cpu().clone()  # a view would be sent with its whole storage
        else:
            large.append(content)
    return _Packed(file.getvalue(), small, [TensorSpec(tuple(each.shape), each.dtype) for each in large]), large


def _unpack(packed: _Packed, large: Sequence[Tensor]) -> Any:
    remaining = iter(large)
    count = len(packed.small) + len(packed.large)
    tensors = [packed.small[number] if number in packed.small else next(remaining) for number in range(count)]
    return _Unpickler(packed.content, tensors).load()
