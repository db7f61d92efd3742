"""A replay for Python side effects alone, with the content of some values of the model available."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lightning_hybrid.step.objects.pytree import flatten, unflatten
from lightning_hybrid.step.replay.execute_stage_by_rerunning_step import ReplayWatch, StageReplay


class SideEffectReplay(StageReplay):
    """Replays a step as a stage without operations; reads of values in ``contents`` return their content.

    Attributes:
        contents: Full tensors by value index; set before a run.
    """

    contents: Mapping[int, Tensor]

    def watch(self, received: Mapping[int, Tensor], parameters: Mapping[int, str]) -> ReplayWatch:
        """Create a mode that answers reads from ``contents``; ``received`` are tensors by index, of any shapes."""
        return _ReadingWatch(self, received, parameters)


class _ReadingWatch(ReplayWatch):
    """Skips every operation of the model, and answers reads from ``contents``."""

    def __init__(self, replay: SideEffectReplay, *rest: Any) -> None:
        super().__init__(replay, *rest)
        self._contents = replay.contents

    def _read(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        leaves, spec = flatten((args, kwargs))
        filled = [self._content(leaf) for leaf in leaves]
        if any(isinstance(leaf, FakeTensor) for leaf in filled):
            return super()._read(name, func, args, kwargs)
        args, kwargs = unflatten(filled, spec)
        return func(*args, **kwargs)

    def _content(self, leaf: Any) -> Any:
        value = self.mark_of(leaf) if isinstance(leaf, Tensor) else None
        return leaf if value is None else self._contents.get(value, leaf)
