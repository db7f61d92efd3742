"""Copies between a device and host memory: many small tensors at once, or large ones on a side stream per direction.

compute stream   forward or gradients ............ backward, or the next step
side stream        copy out, copy out
other side stream                        copy in, copy in
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import Tensor, nn

_HOST = "cpu"  # the type of the device whose memory needs no copy


def is_plain(value: object) -> TypeGuard[Tensor]:
    """Whether a value is a tensor, of any shape and no subclass, whose memory is its own."""
    return type(value) in (Tensor, nn.Parameter)


def is_on_host(tensor: Tensor) -> bool:
    """Whether a tensor of any shape is read without a copy."""
    return tensor.device.type == _HOST


@torch.no_grad()
def read_all(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors in host memory, of equal shapes and dtypes; the host waits once for each device, not for each tensor."""
    found = {index: tensor.detach() for index, tensor in enumerate(tensors) if is_on_host(tensor)}
    for device in dict.fromkeys(tensor.device for tensor in tensors if not is_on_host(tensor)):
        there = {index: tensor for index, tensor in enumerate(tensors) if tensor.device == device}
        contents = [bytes_of(tensor) for tensor in there.values()]
        parts = torch.cat(contents).cpu().split([len(each) for each in contents])
        for (index, tensor), part in zip(there.items(), parts, strict=True):
            found[index] = part.clone().view(tensor.dtype).view(tensor.shape)  # the part may begin anywhere
    return [found[index] for index in range(len(tensors))]


def read_numbers(values: Sequence[float | Tensor]) -> list[float]:
    """Read numbers and tensors of one element, of any shape, as numbers; plain tensors are read together."""
    plain: list[Tensor] = [value for value in values if is_plain(value)]
    read = iter(read_all(plain))
    return [float(next(read) if is_plain(value) else value) for value in values]


class HostReads:
    """Tensors that the host will read: those that wait are copied together, once the first of them is needed."""

    def __init__(self) -> None:
        self._waiting: dict[int, Tensor] = {}
        self._read: dict[int, Tensor] = {}
        self._numbers = itertools.count()

    def add(self, tensor: Tensor) -> int:
        """Let a plain tensor of any shape wait, which must keep its content; returns its number."""
        number = next(self._numbers)
        self._waiting[number] = tensor
        return number

    def take(self, number: int) -> Tensor:
        """The tensor of a number, of the shape that was added, in host memory; once."""
        if number in self._waiting:
            self._read |= zip(self._waiting, read_all(list(self._waiting.values())), strict=True)
            self._waiting = {}
        return self._read.pop(number)


def bytes_of(tensor: Tensor) -> Tensor:
    """The content of a tensor of any shape and strides, as flat bytes."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    return (flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)).view(torch.uint8)


class HostCopies:
    """The two side streams of a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._outward, self._inward = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def to_host(
        self, tensors: Sequence[Tensor], *, may_be_freed: bool = False
    ) -> tuple[list[Tensor], torch.cuda.Event]:
        """Begin to copy what the current stream has computed; returns copies of equal shapes, and their arrival.

        Sources that ``may_be_freed`` at once keep their memory until they are copied.
        """
        self._outward.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._outward):
            copies = [torch.empty_like(each, device="cpu", pin_memory=True) for each in tensors]
            for content, each in zip(copies, tensors, strict=True):
                content.copy_(each, non_blocking=True)
                if may_be_freed:
                    each.record_stream(self._outward)
            return copies, self._outward.record_event()

    def to_device(self, host: Tensor, copied: torch.cuda.Event) -> tuple[Tensor, torch.cuda.Event]:
        """Begin to copy a tensor of any shape to new memory, once it is on the host; returns it, and its arrival."""
        with torch.cuda.stream(self._inward):
            self._inward.wait_event(copied)
            return host.to(self._device, non_blocking=True), self._inward.record_event()

    def into(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Begin to copy to tensors on the device; each comes with its source in pinned memory, of the same shape."""
        with torch.cuda.stream(self._inward):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)

    def wait(self) -> None:
        """Let the current stream wait for all copies to the device."""
        torch.cuda.current_stream(self._device).wait_stream(self._inward)
