"""Tensors in pinned host memory: copied there while the forward goes on, back ahead of their use."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from lightning_hybrid.host_copies import HostCopies
from lightning_hybrid.memory.saved_activations.storage import Unchanged

_MAX_PENDING_BYTES = 256 << 20  # whose copies may still run while their device memory is held


class HostMemory:
    """Moves tensors of one CUDA device to the host and back."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._copies = device, HostCopies(device)
        self._pending: deque[HostTensor] = deque()  # whose device memory is held, as their copies run
        self._pending_bytes = 0

    def put(self, tensor: Tensor, original: Tensor) -> HostTensor:
        """Starts to copy a tensor of shape (n,) to the host.

        Its memory is free on the compute stream after that. ``original`` is a tensor in the same memory, of any shape:
        it must not be written to before that.
        """
        [host], copied = self._copies.to_host([tensor])
        saved = HostTensor(self, host, copied, tensor, Unchanged(original))
        self._pending.append(saved)
        self._pending_bytes += tensor.nbytes
        self._free_copied()
        return saved

    def _free_copied(self) -> None:
        """Frees the device memory of what has been copied, and of the oldest where too many bytes are pending."""
        while self._pending and (self._pending_bytes > _MAX_PENDING_BYTES or self._pending[0].copied.query()):
            first = self._pending.popleft()
            # The compute stream waits, not the host: memory that it allocates from now on may be the source's.
            torch.cuda.current_stream(self._device).wait_event(first.copied)
            self._pending_bytes -= first.host.nbytes
            first.drop_source()

    def take(self, host: Tensor, copied: torch.cuda.Event) -> tuple[Tensor, torch.cuda.Event]:
        """Starts to copy a tensor of shape (n,) to the device; returns it, and the event of its arrival."""
        self._free_copied()
        return self._copies.to_device(host, copied)


class HostTensor:
    """One tensor in host memory, or on its way there."""

    def __init__(
        self, memory: HostMemory, host: Tensor, copied: torch.cuda.Event, source: Tensor, unchanged: Unchanged
    ) -> None:
        self.host, self.copied, self.unchanged = host, copied, unchanged
        self._memory, self._source = memory, source
        self._fetched: tuple[Tensor, torch.cuda.Event] | None = None

    _source: Tensor | None

    def drop_source(self) -> None:
        """Drops the tensor on the device: its copy is complete for work on the compute stream."""
        self._source = None
        self.unchanged.seal()

    def prefetch(self) -> None:
        """Starts to copy it to the device, if it has left it."""
        if self._fetched is None and self._source is None:
            self._fetched = self._memory.take(self.host, self.copied)

    def get(self) -> Tensor:
        """Returns it on the device, of shape (n,), for work on the current stream."""
        self.unchanged.check()
        if self._source is not None:
            return self._source
        self.prefetch()
        assert self._fetched is not None
        tensor, event = self._fetched
        stream = torch.cuda.current_stream(tensor.device)
        stream.wait_event(event)
        tensor.record_stream(stream)
        return tensor

    def bytes_on_host(self) -> Tensor:
        """Waits for the copy; returns the host's tensor, of shape (n,)."""
        self.copied.synchronize()
        return self.host

    def release(self) -> None:
        """Does nothing: torch reuses the memory once nothing refers to it."""
