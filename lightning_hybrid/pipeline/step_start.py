"""What the user's modules held before a training step, to leave the step as if it had never begun."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric

from lightning_hybrid.step.transaction import ModuleState


class StepStart:
    """The modules and metrics of one module at one moment."""

    def __init__(self, root: nn.Module) -> None:
        """Args: root: the user's module."""
        self._metrics = [module for module in root.modules() if isinstance(module, Metric)]
        inside = {inner for metric in self._metrics for inner in metric.modules()}
        self._modules = ModuleState(root, without=inside)
        self._states = [{name: _copied(getattr(metric, name)) for name in metric._defaults} for metric in self._metrics]
        self._counts = [(metric._update_count, metric._computed) for metric in self._metrics]

    def restore(self) -> None:
        """Put everything back."""
        self._modules.restore()
        for metric, states, (count, computed) in zip(self._metrics, self._states, self._counts, strict=True):
            for name, state in states.items():
                setattr(metric, name, state)
            metric._update_count, metric._computed, metric._forward_cache = count, computed, None


def _copied(state: Any) -> Any:
    return state.clone() if isinstance(state, Tensor) else list(state)
