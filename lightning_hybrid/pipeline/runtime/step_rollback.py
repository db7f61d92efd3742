"""A snapshot of modules before a training step, for a rollback if the step breaks in its middle."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from numpy import ndarray
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_hybrid.step.module_state.snapshot import Content, ModuleState, can_be_put_back, reachable
from lightning_hybrid.step.objects.tensor_subclasses import detached_copy
from lightning_hybrid.step.standins.absent_tensors import is_absent
from lightning_hybrid.step.tracing.recording import StepError

_MOST_COPIED = 2**24  # before every step


class StepStart:
    """The modules and metrics of one module at one moment."""

    def __init__(self, root: nn.Module, written: Collection[str] = (), *, copied: float = _MOST_COPIED) -> None:
        """What there is before the step.

        Args:
            root: The user's module.
            written: FQNs of parameters that the step writes itself.
            copied: Elements of the largest tensor kept as an attribute that is copied.
        """
        named = root.named_parameters() if written else ()
        self._written = [(p, detached_copy(p)) for name, p in named if name in written and not is_absent(p)]
        self._metrics = [module for module in root.modules() if isinstance(module, Metric)]
        inside = {inner for metric in self._metrics for inner in metric.modules()}
        self._modules = ModuleState(root, without=inside)
        self._states = [{name: _copied(getattr(metric, name)) for name in metric._defaults} for metric in self._metrics]
        leaves = list(reachable(root, inside, plain=False))
        tensors = [(place, leaf) for place, leaf in leaves if isinstance(leaf, Tensor) and can_be_put_back(leaf)]
        self._tensors = [Content(leaf) for _, leaf in tensors if leaf.numel() <= copied]
        self._large = [(place, leaf, leaf._version) for place, leaf in tensors if leaf.numel() > copied]
        self._arrays = [(leaf, leaf.copy()) for _, leaf in leaves if isinstance(leaf, ndarray)]
        self._counts = [(metric._update_count, metric._computed) for metric in self._metrics]

    def restore(self, why: str = "is left") -> None:
        """Put everything back.

        Args:
            why: What the step does, so that it is left.

        Raises:
            StepError: A tensor that is too large to be copied before each step has been written.
        """
        for place, tensor, version in self._large:
            if tensor._version != version:
                raise StepError(
                    f"training_step {why}, and cannot be run again: it has written {place}, whose {tensor.numel():,}"
                    f" elements are more than the {_MOST_COPIED:,} that are copied before a step; register it as a"
                    " buffer"
                )
        self._modules.restore()
        for content in self._tensors:
            content.restore()
        for array, content in self._arrays:
            array[...] = content
        with torch.no_grad():
            for parameter, values in self._written:
                parameter.copy_(values)
        for metric, states, (count, computed) in zip(self._metrics, self._states, self._counts, strict=True):
            for name, state in states.items():
                setattr(metric, name, state)
            metric._update_count, metric._computed, metric._forward_cache = count, computed, None


def _copied(state: Any) -> Any:
    return state.clone() if isinstance(state, Tensor) else list(state)
