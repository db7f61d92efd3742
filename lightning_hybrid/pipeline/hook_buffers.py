"""Buffers in hooks of the user: those that a step writes are right on one pipeline rank, until all have the content."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.pipeline.exchange import broadcast_buffer
from lightning_hybrid.pipeline.known import Contents
from lightning_hybrid.step.absent import is_absent
from lightning_hybrid.step.tree import flatten


class HookBuffers:
    """Gives all ranks the content of the buffers that a hook touches, once in each hook.

    What the hook then writes, it writes on all ranks alike; so the rank that the buffer is right on has it too.
    """

    def __init__(
        self,
        homes: Callable[[], Mapping[int, int]],
        contents: Contents,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        """Args: homes: pipeline rank by id of each such buffer. contents, group, device: of the pipeline."""
        self._homes, self._contents, self._group, self._device = homes, contents, group, device
        self._left: dict[int, int] | None = None  # of this hook: those that it has not touched yet

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
            if self._left is None:
                self._left = dict(self._homes())
            home = self._left.pop(id(leaf), None)
            if home is not None:
                with torch._C.DisableTorchFunction():
                    self._contents.meet(hook, f"reads a buffer of shape {tuple(leaf.shape)}")
                    broadcast_buffer(leaf, home, self._group, self._device)

    def forget(self) -> None:
        """End of a hook: the next step writes buffers again."""
        self._left = None
