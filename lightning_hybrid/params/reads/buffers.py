"""Broadcasts of buffers to user hooks, from the pipeline rank whose step writes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.collectives.tensors import broadcast_buffer
from lightning_hybrid.params.reads.agreement import HookAgreement
from lightning_hybrid.step.objects.pytree import flatten
from lightning_hybrid.step.standins.absent_tensors import is_absent

# Buffers of at most this many elements are sent together.
_FEW_ELEMENTS = 1 << 16


class HookBuffers:
    """Broadcasts the buffers that a hook uses, once in each hook.

    Hooks run on all ranks, so what a hook writes to a buffer is also written on the rank that has the right content.
    """

    def __init__(
        self,
        owners: Callable[[], Sequence[tuple[Tensor, int]]],
        agreement: HookAgreement,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        """Take the pipeline rank that owns each buffer (``owners``), and what belongs to the pipeline."""
        self._owners, self._agreement, self._group, self._device = owners, agreement, group, device
        self._stale: dict[int, tuple[Tensor, int]] | None = None  # buffers that are not yet refreshed in this hook

    def refresh(self, hook: str, arguments: Any) -> None:
        """Refresh the buffers in a pytree of an operation's arguments; collective over the pipeline if there are any.

        Raises:
            RanksDisagree: Some ranks read it and others do not.
        """
        if self._stale is not None and not self._stale:
            return
        for leaf in flatten(arguments)[0]:
            if not isinstance(leaf, Tensor) or isinstance(leaf, torch.nn.Parameter) or is_absent(leaf):
                continue
            with torch._C.DisableTorchFunction():
                if self._stale is None:
                    self._stale = {id(buffer): (buffer, owner) for buffer, owner in self._owners()}
                if id(leaf) in self._stale:
                    self._agreement.agree_on(hook, f"reads a buffer of shape {tuple(leaf.shape)}")
                    self._send(leaf)

    def _send(self, buffer: Tensor) -> None:
        """Broadcast one buffer, and with a small one all small ones."""
        assert self._stale is not None
        batches: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        for key, (other, owner) in list(self._stale.items()):
            if other is buffer or max(other.numel(), buffer.numel()) <= _FEW_ELEMENTS:
                batches.setdefault((owner, other.dtype), []).append(other)
                del self._stale[key]
        for (owner, _), buffers in batches.items():
            content = torch.cat([one.detach().to(self._device).reshape(-1) for one in buffers])
            broadcast_buffer(content, owner, self._group, self._device)
            if self._group.rank() != owner:
                for one, sent in zip(buffers, content.split([one.numel() for one in buffers]), strict=True):
                    one.detach().copy_(sent.view(one.shape))

    def forget(self) -> None:
        """Mark all buffers as stale at the end of a hook: the next step writes them again."""
        self._stale = None
