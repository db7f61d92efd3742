"""Module state per stage, where one rank runs several stages.

Python side effects count once per microbatch, also where this rank runs several stages of it; and a state that one
microbatch stores for the next (a hidden state) is present on the stage that computed it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_hybrid.step.module_state.snapshots import ModuleSnapshot, TensorSnapshot
from lightning_hybrid.step.standins.tensors import is_absent


class StageModuleStates:
    """Switches the state of the modules between stages; does nothing where a rank has only one."""

    def __init__(
        self, root: nn.Module, stages: Collection[int], num_forwards: int, buffers: Sequence[tuple[dict[str, Any], str]]
    ) -> None:
        """Snapshot the modules before a step.

        Args:
            root: The user's LightningModule.
            stages: The stages of this rank.
            num_forwards: Number of forwards of all these stages.
            buffers: Buffers that every stage writes (``num_batches_tracked += 1``): the dict that contains each, and
                its key.
        """
        self._root = root
        self._last = max(stages)
        self._forwards_left = num_forwards
        self._buffers = buffers
        self._contents: dict[int, TensorSnapshot] = {}  # by id of a buffer: its last copy
        self._states: dict[int, tuple[ModuleSnapshot, list[tuple[Any, TensorSnapshot | None]]]] = {}
        self._start = self._now() if len(stages) > 1 else None

    def enter(self, stage: int) -> None:
        """Restore the module state that the last run of this stage left."""
        if self._start is not None:
            self._restore(*self._states.get(stage, self._start))

    def leave(self, stage: int) -> None:
        """Save the module state of a stage; after the last forward, the state of the last stage stays."""
        if self._start is None:
            return
        self._forwards_left -= 1
        self._states[stage] = self._now()
        if not self._forwards_left and stage != self._last:
            self._restore(*self._states[self._last])

    def _now(self) -> tuple[ModuleSnapshot, list[tuple[Any, TensorSnapshot | None]]]:
        buffers = [members.get(name) for members, name in self._buffers]
        state = ModuleSnapshot(self._root, buffers=False)
        return state, [(buffer, self._content(buffer)) for buffer in buffers]

    def _content(self, buffer: Any) -> TensorSnapshot | None:
        if not isinstance(buffer, Tensor) or is_absent(buffer):
            return None
        content = self._contents.get(id(buffer))
        if content is None or not content.is_here():
            self._contents[id(buffer)] = content = TensorSnapshot(buffer)
        return content

    def _restore(self, state: ModuleSnapshot, buffers: list[tuple[Any, TensorSnapshot | None]]) -> None:
        state.restore()
        for (members, name), (buffer, content) in zip(self._buffers, buffers, strict=True):
            members[name] = buffer
            if content is not None:
                content.restore()
                self._contents[id(buffer)] = content
