"""Whether a training step leaves something of its batch on the user's modules: then no rank may run a share of it.

Buffers (statistics, queues, centres), tensors and numbers in attributes would be those of a share. But whole numbers
that have grown by one count batches, and what lists have grown by is joined (``appended``).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric

from lightning_hybrid.pipeline.appended import lists_of
from lightning_hybrid.step.transaction import Place, reachable

_NOTHING = object()


class LeftBehind:
    """Compares the modules after a step with what they were before it."""

    def __init__(self, root: nn.Module) -> None:
        """Before the step: args: root: the user's module."""
        self._root = root
        self._before = _state(root)
        self._lengths = {place: len(held) for place, held in lists_of(root).items()}

    def something(self) -> bool:
        """Whether the step has written a buffer, or kept a tensor or a float that was not there."""
        lists = {place: self._lengths.get(place, 0) for place in lists_of(self._root)}
        return any(not (isinstance(key, Place) and _is_appended(key, lists)) for key in self._changed())

    def rows(self, samples: int | None) -> bool:
        """Whether a tensor among it may have a row for each sample of the batch, so that a microbatch needs some.

        Args:
            samples: Of the batch; None if they are not known.
        """
        changed = self._changed()
        tensors = [leaf for place, leaf in reachable(self._root, plain=False) if place in changed]
        tensors += [
            buffer
            for fqn, module in self._root.named_modules()
            for name, buffer in module._buffers.items()
            if (fqn, name) in changed and buffer is not None
        ]
        return any(isinstance(leaf, Tensor) and (samples is None or samples in leaf.shape) for leaf in tensors)

    def _changed(self) -> set[Any]:
        now = _state(self._root).items()
        return {key for key, value in now if not _is_same(self._before.get(key, _NOTHING), value)}


def _is_same(before: Any, now: Any) -> bool:
    is_counter = type(now) is int and (now - before == 1 if type(before) is int else now in (0, 1))
    return is_counter or bool(before == now)


def _is_appended(place: Place, lengths: dict[tuple[str, str, Any], int]) -> bool:
    path = place.path
    if len(path) > 0 and (place.module, place.attribute, None) in lengths:
        return bool(path[0] >= lengths[place.module, place.attribute, None])
    if len(path) > 1 and (place.module, place.attribute, path[0]) in lengths:
        return bool(path[1] >= lengths[place.module, place.attribute, path[0]])
    return False


def _state(root: nn.Module) -> dict[Any, Any]:
    metrics = {inner for module in root.modules() if isinstance(module, Metric) for inner in module.modules()}
    found: dict[Any, Any] = {}
    for fqn, module in root.named_modules():
        for name, buffer in module._buffers.items() if module not in metrics else ():
            if buffer is not None:
                found[fqn, name] = id(buffer), buffer._version
    for place, leaf in reachable(root, metrics):
        if isinstance(leaf, Tensor):
            found[place] = id(leaf), leaf._version
        elif isinstance(leaf, float | int) and not isinstance(leaf, bool):
            found[place] = leaf
    return found
