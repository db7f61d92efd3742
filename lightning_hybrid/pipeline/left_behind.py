"""Whether a training step leaves something of its batch on the user's modules: then no rank may run a share of it.

Buffers (statistics, queues, centres), tensors and floats in attributes would be those of a share. Whole numbers are
counters, and lists that grow are joined (``appended``).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric

from lightning_hybrid.step.transaction import reachable


class LeftBehind:
    """Compares the modules after a step with what they were before it."""

    def __init__(self, root: nn.Module) -> None:
        """Before the step: args: root: the user's module."""
        self._root = root
        self._before = _state(root)

    def something(self) -> bool:
        """Whether the step has written a buffer, or kept a tensor or a float that was not there."""
        return any(key not in self._before or self._before[key] != value for key, value in _state(self._root).items())


def _state(root: nn.Module) -> dict[Any, Any]:
    metrics = {inner for module in root.modules() if isinstance(module, Metric) for inner in module.modules()}
    found: dict[Any, Any] = {}
    for fqn, module in root.named_modules():
        for name, buffer in module._buffers.items() if module not in metrics else ():
            if buffer is not None:
                found[fqn, name] = id(buffer), buffer._version
    for place, leaf in reachable(root, metrics):
        if any(isinstance(key, int) for key in place.path):  # of a list
            continue
        if isinstance(leaf, Tensor):
            found[place] = id(leaf), leaf._version
        elif isinstance(leaf, float):
            found[place] = leaf
    return found
