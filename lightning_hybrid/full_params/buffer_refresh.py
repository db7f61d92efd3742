"""Buffers in user hooks: a broadcast from the pipeline rank whose step writes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.collectives.rank_agreement import broadcast_buffer
from lightning_hybrid.full_params.value_locations import Contents
from lightning_hybrid.step.objects.pytree import flatten
from lightning_hybrid.step.standins.absent_tensors import is_absent

# Buffers with no more elements are sent together.
_FEW_ELEMENTS = 1 << 16


class HookBuffers:
    """Gives all ranks the content of the buffers that a hook touches, once in each hook.

    What the hook then writes, it writes on all ranks alike; so the rank that the buffer is right on has it too.
    """

    def __init__(
        self,
        homes: Callable[[], Sequence[tuple[Tensor, int]]],
        contents: Contents,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        """Args: homes: such buffers, and the pipeline rank of each. contents, group, device: of the pipeline."""
        self._homes, self._contents, self._group, self._device = homes, contents, group, device
        self._left: dict[int, tuple[Tensor, int]] | None = None  # of this hook: those that are not fresh

    def refresh(self, hook: str, arguments: Any) -> None:
        """Before an operation; collective over the pipeline if a buffer is among its arguments.

        Args:
            hook: For messages.
            arguments: A tree.

        Raises:
            RanksDisagree: Some ranks read it and others do not.
        """
        if self._left is not None and not self._left:
            return
        for leaf in flatten(arguments)[0]:
            if not isinstance(leaf, Tensor) or isinstance(leaf, torch.nn.Parameter) or is_absent(leaf):
                continue
            with torch._C.DisableTorchFunction():
                if self._left is None:
                    self._left = {id(buffer): (buffer, home) for buffer, home in self._homes()}
                if id(leaf) in self._left:
                    self._contents.meet(hook, f"reads a buffer of shape {tuple(leaf.shape)}")
                    self._send(leaf)

    def _send(self, buffer: Tensor) -> None:
        """One buffer, and with a small one all that are small."""
        assert self._left is not None
        together: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        for key, (other, home) in list(self._left.items()):
            if other is buffer or max(other.numel(), buffer.numel()) <= _FEW_ELEMENTS:
                together.setdefault((home, other.dtype), []).append(other)
                del self._left[key]
        for (home, _), buffers in together.items():
            content = torch.cat([one.detach().to(self._device).reshape(-1) for one in buffers])
            broadcast_buffer(content, home, self._group, self._device)
            if self._group.rank() != home:
                for one, sent in zip(buffers, content.split([one.numel() for one in buffers]), strict=True):
                    one.detach().copy_(sent.view(one.shape))

    def forget(self) -> None:
        """End of a hook: the next step writes buffers again."""
        self._left = None
