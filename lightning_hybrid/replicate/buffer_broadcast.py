"""Broadcast of module buffers from the first replica, as in DDP, before a step that follows averaged gradients.

Each replica writes buffers from its own data (the statistics of BatchNorm); without the broadcast they would diverge,
and replicas would validate different models.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from lightning_hybrid.step.standins.absent_tensors import is_absent

# Attribute of a module: names of buffers that DDP does not broadcast.
_IGNORED = "_ddp_params_and_buffers_to_ignore"


class ReplicaBufferBroadcast:
    """Broadcasts the buffers of one module over its replicas.

    The message has the shapes of the buffers at construction, so that its size is fixed and no rank hangs where user
    code has replaced a buffer on another. A buffer whose shape has changed, on the first replica or here, is skipped.

    Attributes:
        is_local: Whether replicas step by themselves, so that `share` does nothing.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
        self._module, self._group, self._device = module, group, device
        ignored = frozenset(getattr(module, _IGNORED, ()))
        buffers = {name: buffer for name, buffer in module.named_buffers() if name not in ignored}
        present = {name: buffer for name, buffer in buffers.items() if group.size() > 1 and not is_absent(buffer)}
        self._kinds = {name: (buffer.shape, buffer.dtype) for name, buffer in present.items()}
        self._is_due = True
        self.is_local = False

    @torch.no_grad()
    def share(self) -> None:
        """Broadcasts the buffers before a step or an evaluation, if due; collective over replicas."""
        if not self._is_due or not self._kinds or self.is_local:
            return
        self._is_due = False
        self._broadcast()

    @torch.no_grad()
    def average(self) -> None:
        """Averages floating-point buffers over replicas, and broadcasts the others; collective over replicas."""
        if not self._kinds:
            return
        names = [name for name, (_, dtype) in self._kinds.items() if dtype.is_floating_point]
        buffers, is_same = dict(self._module.named_buffers()), {}
        for name in names:
            shape, dtype = self._kinds[name]
            buffer = buffers.get(name)
            is_same[name] = buffer is not None and (buffer.shape, buffer.dtype) == (shape, dtype)
        message = torch.cat(
            [
                torch.tensor([float(is_same[name]) for name in names], device=self._device, dtype=torch.float64),
                *(
                    buffers[name].detach().to(self._device, torch.float64).reshape(-1)
                    if is_same[name]
                    else torch.zeros(self._kinds[name][0].numel(), device=self._device, dtype=torch.float64)
                    for name in names
                ),
            ]
        )
        dist.all_reduce(message, group=self._group)
        self._broadcast()
        flags, *sums = message.split([len(names), *(self._kinds[name][0].numel() for name in names)])
        for name, flag, total in zip(names, flags.tolist(), sums, strict=True):
            if flag == self._group.size():
                buffers[name].copy_(total.view(buffers[name].shape) / flag)

    def _broadcast(self) -> None:
        buffers = dict(self._module.named_buffers())
        valid = {
            name: buffer
            for name, kind in self._kinds.items()
            if (buffer := buffers.get(name)) is not None and (buffer.shape, buffer.dtype) == kind
        }
        flags = torch.tensor([name in valid for name in self._kinds], dtype=torch.uint8, device=self._device)
        sizes = [shape.numel() * dtype.itemsize for shape, dtype in self._kinds.values()]
        contents = [
            valid[name].to(self._device).reshape(-1).contiguous().view(torch.uint8)
            if name in valid
            else flags.new_zeros(size)
            for name, size in zip(self._kinds, sizes, strict=True)
        ]
        message = torch.cat([flags, *contents])
        dist.broadcast(message, group=self._group, group_src=0)
        if self._group.rank() == 0:
            return
        flags, *contents = message.split([len(flags), *sizes])
        for name, flag, content in zip(self._kinds, flags.tolist(), contents, strict=True):
            if flag and name in valid:
                shape, dtype = self._kinds[name]
                # The slice may begin at an offset that is not aligned for this dtype.
                valid[name].copy_(content.clone().view(dtype).view(shape))

    def after_step(self, *, averaged: bool) -> None:
        """Schedules the next broadcast after a step that ``averaged`` gradients, to which the next one does not add."""
        self._is_due = averaged
