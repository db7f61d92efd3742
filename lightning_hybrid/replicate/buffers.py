"""Broadcast of module buffers from the first replica, as in DDP, before a step that follows averaged gradients.

Each replica writes buffers from its own data (the statistics of BatchNorm); without the broadcast they would diverge,
and replicas would validate different models.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.step.standins.tensors import is_absent

# Attribute of a module: names of buffers that DDP does not broadcast.
_IGNORED = "_ddp_params_and_buffers_to_ignore"
_Kinds = dict[str, tuple[torch.Size, torch.dtype]]


class ReplicaBufferBroadcast:
    """Broadcasts the buffers of one module over its replicas.

    Buffers are listed before each broadcast, since hooks and steps of the user register and replace them. The message
    has the shapes that the replicas have agreed on, and says whether the first replica has others now; then the
    replicas agree on these. So no rank hangs where user code has replaced a buffer on another: one that a rank lacks,
    or has in another shape, is skipped there.

    Attributes:
        is_local: Whether replicas step by themselves, so that `share` does nothing.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
        self._module, self._group, self._device = module, group, device
        self._ignored = frozenset(getattr(module, _IGNORED, ()))
        self._kinds: _Kinds = {}  # of the first replica, as all replicas know them
        self._num_calls = 0
        self._is_due = True
        self.is_local = False

    @torch.no_grad()
    def share(self) -> None:
        """Broadcasts the buffers before a step or an evaluation, if due; collective over replicas."""
        if not self._is_due or self.is_local or self._group.size() == 1:
            return
        self._is_due = False
        self._num_calls += 1
        # A module without buffers is seldom asked, since the answer makes the host wait for the device.
        if self._kinds or self._num_calls.bit_count() == 1:
            self._broadcast()

    @torch.no_grad()
    def average(self) -> None:
        """Averages floating-point buffers over replicas, and broadcasts the others; collective over replicas."""
        if self._first_has_others():
            self._agree()
        if not self._kinds:
            return
        names = [name for name, (_, dtype) in self._kinds.items() if dtype.is_floating_point]
        buffers = self._agreed()
        message = torch.cat(
            [
                torch.tensor([float(name in buffers) for name in names], device=self._device, dtype=torch.float64),
                *(
                    buffers[name].detach().to(self._device, torch.float64).reshape(-1)
                    if name in buffers
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

    def step_alone(self, is_local: bool) -> None:
        """Leaves this rank's buffers as they are, or shares them, from now on."""
        self.is_local = is_local

    def after_step(self, *, averaged: bool) -> None:
        """Schedules the next broadcast after a step that ``averaged`` gradients, to which the next one does not add."""
        self._is_due = averaged

    def _present(self) -> dict[str, Tensor]:
        """The buffers that this rank has now."""
        named = self._module.named_buffers()
        return {name: buffer for name, buffer in named if name not in self._ignored and not is_absent(buffer)}

    def _agreed(self) -> dict[str, Tensor]:
        """The buffers of this rank that are as the replicas have agreed."""
        return {name: buffer for name, buffer in self._present().items() if self._kinds.get(name) == _kind(buffer)}

    def _first_has_others(self) -> bool:
        """Whether the first replica has other buffers than were agreed; collective over replicas."""
        flag = torch.tensor([self._kinds != _kinds_of(self._present())], dtype=torch.uint8, device=self._device)
        dist.broadcast(flag, group=self._group, group_src=0)
        return bool(flag)

    def _agree(self) -> None:
        """Adopt the names, shapes and dtypes of the first replica's buffers; collective over replicas."""
        box = [_kinds_of(self._present())]
        dist.broadcast_object_list(box, group=self._group, group_src=0, device=self._device)
        [self._kinds] = box

    def _broadcast(self) -> None:
        is_first = self._group.rank() == 0
        has_others = is_first and self._kinds != _kinds_of(self._present())
        sizes = [shape.numel() * dtype.itemsize for shape, dtype in self._kinds.values()]
        buffers = self._agreed()
        flag = torch.tensor([has_others], dtype=torch.uint8, device=self._device)
        contents = [
            buffers[name].to(self._device).reshape(-1).contiguous().view(torch.uint8)
            if name in buffers
            else flag.new_zeros(size)
            for name, size in zip(self._kinds, sizes, strict=True)
        ]
        message = torch.cat([flag, *contents])
        dist.broadcast(message, group=self._group, group_src=0)
        if has_others if is_first else bool(message[0]):
            self._agree()
            self._broadcast()
        elif not is_first:
            _, *contents = message.split([1, *sizes])
            for (name, (shape, dtype)), content in zip(self._kinds.items(), contents, strict=True):
                if name in buffers:
                    # The slice may begin at an offset that is not aligned for this dtype.
                    buffers[name].copy_(content.clone().view(dtype).view(shape))


def _kind(buffer: Tensor) -> tuple[torch.Size, torch.dtype]:
    return buffer.shape, buffer.dtype


def _kinds_of(buffers: Mapping[str, Tensor]) -> _Kinds:
    return {name: _kind(buffer) for name, buffer in buffers.items()}
