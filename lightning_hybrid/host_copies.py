"""Copies between a CUDA device and pinned host memory, on a side stream for each direction.

compute stream   forward or gradients ............ backward, or the next step
side stream        copy out, copy out
other side stream                        copy in, copy in
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


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
