"""A patch for functional torchmetrics that branch on whether their input is probabilities or logits.

On a CPU they use a Python branch, on other devices ``torch.where``; a step with absent values uses the latter.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lightning_hybrid.step.tracing.intercept_step_operations import CurrentRun

_NAME = "normalize_logits_if_needed"


def branchless_normalization(current: CurrentRun) -> Sequence[tuple[Any, str, Any]]:
    """Replacements, as (module, name, function), of the branching function in modules of torchmetrics."""
    original = getattr(sys.modules.get("torchmetrics.utilities.compute"), _NAME, None)
    if original is None:
        return ()
    return [(module, _NAME, _normalize_by_where(current, original)) for module in _importing_modules(len(sys.modules))]


@functools.lru_cache(maxsize=1)
def _importing_modules(count: int) -> list[ModuleType]:
    del count  # cached until another module is loaded
    loaded = [module for name, module in sys.modules.items() if name.startswith("torchmetrics.functional.")]
    return [module for module in loaded if _NAME in vars(module)]


def _normalize_by_where(current: CurrentRun, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def normalize(tensor: Tensor, normalization: str | None) -> Tensor:
        """The probabilities of a tensor of logits or probabilities, of the same shape."""
        watch = current.watch
        if not normalization or watch is None or watch.inside_unit or not watch.is_model_value(tensor):
            return original(tensor, normalization)
        normalized = tensor.sigmoid() if normalization == "sigmoid" else tensor.softmax(1)
        return torch.where(((tensor < 0) | (tensor > 1)).any(), normalized, tensor)

    return normalize
