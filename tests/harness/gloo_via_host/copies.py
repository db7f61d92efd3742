"""Asynchronous copies between tensors of a device and host memory, on a side stream for each direction.

current stream   write inputs | mark ............................ | read outputs
to the host                     [copy inputs]
gloo                                         [operation]
from the host                                            [copy outputs]
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor


class Event(Protocol):
    """A point in a stream, as ``torch.cuda.Event``."""

    def query(self) -> bool:
        """Return whether the stream has reached it."""

    def synchronize(self) -> None:
        """Wait on the host until the stream has reached it."""


E = TypeVar("E", bound=Event)


class Copies(ABC, Generic[E]):
    """Copies between one device and the host; both have contiguous tensors of one shape and dtype."""

    @abstractmethod
    def mark(self) -> E:
        """Return the present position of the current stream."""

    @abstractmethod
    def host_memory(self, like: Tensor) -> Tensor:
        """Return an uninitialized host tensor of the shape and dtype of another."""

    @abstractmethod
    def to_host(self, sources: Sequence[Tensor], targets: Sequence[Tensor], mark: E) -> E:
        """Begin to copy to the host once the current stream has reached a mark; the sources may be freed at once.

        Args:
            sources: On the device, of any shape.
            targets: On the host, each of the shape of its source.
            mark: A position of the current stream.

        Returns:
            The event that all copies are complete.
        """

    @abstractmethod
    def from_host(self, sources: Sequence[Tensor], targets: Sequence[Tensor], mark: E) -> E:
        """Begin to copy from the host, after a mark of the current stream; the targets may be freed at once.

        Args:
            sources: On the host, of any shape.
            targets: On the device, each of the shape of its source.
            mark: A position of the current stream.

        Returns:
            The event that all copies are complete.
        """

    @abstractmethod
    def order_current_stream(self, event: E) -> None:
        """Let the current stream wait for an event; the host does not wait."""


class CudaCopies(Copies[torch.cuda.Event]):
    """Copies between a CUDA device and pinned memory."""

    def __init__(self, device: torch.device) -> None:
        """Make the streams of a device with an index."""
        self._device = device
        self._to_host, self._from_host = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def mark(self) -> torch.cuda.Event:
        """Record an event on the current stream."""
        return torch.cuda.current_stream(self._device).record_event()

    def host_memory(self, like: Tensor) -> Tensor:
        """Return pinned memory of the same shape, which the allocator reuses once copies from and to it are over."""
        return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=True)

    def to_host(self, sources: Sequence[Tensor], targets: Sequence[Tensor], mark: torch.cuda.Event) -> torch.cuda.Event:
        """Begin to copy from the device to host tensors of the same shapes."""
        return self._copy(self._to_host, sources, targets, mark, on_device=sources)

    def from_host(
        self, sources: Sequence[Tensor], targets: Sequence[Tensor], mark: torch.cuda.Event
    ) -> torch.cuda.Event:
        """Begin to copy to device tensors of the same shapes."""
        return self._copy(self._from_host, sources, targets, mark, on_device=targets)

    def _copy(
        self,
        stream: torch.cuda.Stream,
        sources: Sequence[Tensor],
        targets: Sequence[Tensor],
        mark: torch.cuda.Event,
        *,
        on_device: Sequence[Tensor],
    ) -> torch.cuda.Event:
        stream.wait_event(mark)
        with torch.cuda.stream(stream):
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)
            for tensor in on_device:
                tensor.record_stream(stream)  # its memory is not reused before the copy is over
            event = torch.cuda.Event(blocking=True)
            event.record(stream)
        return event

    def order_current_stream(self, event: torch.cuda.Event) -> None:
        """Let the current stream wait for an event."""
        torch.cuda.current_stream(self._device).wait_event(event)


class _Past:
    """A point that has been reached."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


PAST = _Past()


class HostCopies(Copies[_Past]):
    """Copies of tensors that are on the host themselves, complete at once; for tests without a GPU."""

    def mark(self) -> _Past:
        """Return a point that has been reached."""
        return PAST

    def host_memory(self, like: Tensor) -> Tensor:
        """Return ordinary memory of the same shape."""
        return torch.empty(like.shape, dtype=like.dtype, device="cpu")

    def to_host(self, sources: Sequence[Tensor], targets: Sequence[Tensor], mark: _Past) -> _Past:
        """Copy at once, between tensors of the same shapes."""
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)
        return mark

    from_host = to_host

    def order_current_stream(self, event: _Past) -> None:
        """Do nothing."""


@cache
def copies_of(device: torch.device) -> Copies[torch.cuda.Event] | Copies[_Past]:
    """Return the copies between a device, which has an index if it is a CUDA device, and the host."""
    return CudaCopies(device) if device.type == "cuda" else HostCopies()


@contextlib.contextmanager
def below_modes() -> Iterator[None]:
    """Hide the operations inside from modes of the caller and from autograd, as those of a C++ backend are."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch(), torch.inference_mode():
        yield
