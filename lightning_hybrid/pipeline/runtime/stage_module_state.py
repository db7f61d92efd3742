"""Module state per stage, where one rank runs several stages.

Python side effects count once per microbatch, also where this rank runs several stages of it; and what one
microbatch leaves for the next (a hidden state) is there on the stage that made it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_hybrid.step.module_state.snapshot import Content, ModuleState
from lightning_hybrid.step.standins.absent_tensors import is_absent


class StageStates:
    """Switches the modules between stages; does nothing where a rank has only one."""

    def __init__(
        self, root: nn.Module, stages: Collection[int], num_forwards: int, buffers: Sequence[tuple[dict[str, Any], str]]
    ) -> None:
        """The modules as they are before a step.

        Args:
            root: The user's LightningModule.
            stages: Of this rank.
            num_forwards: Of all of them together.
            buffers: Those that every stage writes for itself (``num_batches_tracked += 1``): the dict that holds each,
                and its name there.
        """
        self._root = root
        self._last = max(stages)
        self._forwards_left = num_forwards
        self._buffers = buffers
        self._contents: dict[int, Content] = {}  # by id of a buffer: the last one known
        self._states: dict[int, tuple[ModuleState, list[tuple[Any, Content | None]]]] = {}
        self._start = self._now() if len(stages) > 1 else None

    def enter(self, stage: int) -> None:
        """Show the step what this stage's last run left on the modules."""
        if self._start is not None:
            self._restore(*self._states.get(stage, self._start))

    def leave(self, stage: int) -> None:
        """Keep what it left; after the last forward, what the last stage left stays."""
        if self._start is None:
            return
        self._forwards_left -= 1
        self._states[stage] = self._now()
        if not self._forwards_left and stage != self._last:
            self._restore(*self._states[self._last])

    def _now(self) -> tuple[ModuleState, list[tuple[Any, Content | None]]]:
        held = [holder.get(name) for holder, name in self._buffers]
        state = ModuleState(self._root, buffers=False)
        return state, [(buffer, self._content(buffer)) for buffer in held]

    def _content(self, buffer: Any) -> Content | None:
        if not isinstance(buffer, Tensor) or is_absent(buffer):
            return None
        known = self._contents.get(id(buffer))
        if known is None or not known.is_here():
            self._contents[id(buffer)] = known = Content(buffer)
        return known

    def _restore(self, state: ModuleState, held: list[tuple[Any, Content | None]]) -> None:
        state.restore()
        for (holder, name), (buffer, content) in zip(self._buffers, held, strict=True):
            holder[name] = buffer
            if content is not None:
                content.restore()
                self._contents[id(buffer)] = content
