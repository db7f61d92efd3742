"""Replicas have the buffers of the first, as under DDP: it sends them before a step that follows averaged gradients.

Each replica writes buffers from its own data (the statistics of BatchNorm); without this they would drift apart, and a
validation would be one of several models.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.step.standins.absent_tensors import is_absent

# Of a module: names that DDP leaves alone.
_IGNORED = "_ddp_params_and_buffers_to_ignore"


class ReplicaBuffers:
    """The buffers of one module over its replicas.

    What the module holds at first is what is sent: one message of a fixed size, so that no rank waits for another whose
    code has bound a buffer anew. One that has another shape by now, on the first replica or here, stays as it is.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
        """Args: module: the user's. group: the ranks that hold the same of other replicas. device: of this rank."""
        self._module, self._group, self._device = module, group, device
        ignored = frozenset(getattr(module, _IGNORED, ()))
        held = {name: buffer for name, buffer in module.named_buffers() if name not in ignored}
        self._kinds = {name: _kind(buffer) for name, buffer in held.items() if not is_absent(buffer)}
        if group.size() == 1:
            self._kinds = {}
        self._is_due = True

    @torch.no_grad()
    def share(self) -> None:
        """Before a step or an evaluation: take over those of the first replica, if due; collective over replicas."""
        if not self._is_due or not self._kinds:
            return
        self._is_due = False
        buffers = dict(self._module.named_buffers())
        held = {
            name: b for name, kind in self._kinds.items() if (b := buffers.get(name)) is not None and _kind(b) == kind
        }
        flags = torch.tensor([name in held for name in self._kinds], dtype=torch.uint8, device=self._device)
        sizes = [shape.numel() * dtype.itemsize for shape, dtype in self._kinds.values()]
        parts = [
            _bytes_of(held[name], self._device) if name in held else flags.new_zeros(size)
            for name, size in zip(self._kinds, sizes, strict=True)
        ]
        message = torch.cat([flags, *parts])
        dist.broadcast(message, group=self._group, group_src=0)
        if self._group.rank() == 0:
            return
        flags, *parts = message.split([len(flags), *sizes])
        for name, flag, part in zip(self._kinds, flags.tolist(), parts, strict=True):
            if flag and name in held:
                shape, dtype = self._kinds[name]
                # A part may begin where no number of this type may.
                held[name].copy_(part.clone().view(dtype).view(shape))

    def after_step(self, *, averaged: bool) -> None:
        """After a training step.

        Args:
            averaged: Whether its gradients are averaged; those of the next step add up to them if not.
        """
        self._is_due = averaged


def _kind(buffer: Tensor) -> tuple[torch.Size, torch.dtype]:
    return buffer.shape, buffer.dtype


def _bytes_of(buffer: Tensor, device: torch.device) -> Tensor:
    return buffer.to(device).reshape(-1).contiguous().view(torch.uint8)
