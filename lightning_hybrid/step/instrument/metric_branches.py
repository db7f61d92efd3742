"""Functional torchmetrics that branch on whether they were given probabilities or logits.

On a CPU they ask by a branch, elsewhere by ``torch.where``. A step whose values are not there does the latter.
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
    from lightning_hybrid.step.tracing.step_mode import Current

_NAME = "normalize_logits_if_needed"


def without_branches(current: Current) -> Sequence[tuple[Any, str, Any]]:
    """What takes the place of this question where modules of torchmetrics ask it, by owner and name.

    Args:
        current: The run of a step that is under way.
    """
    original = getattr(sys.modules.get("torchmetrics.utilities.compute"), _NAME, None)
    if original is None:
        return ()
    return [(module, _NAME, _asked_by_where(current, original)) for module in _asking(len(sys.modules))]


@functools.lru_cache(maxsize=1)
def _asking(count: int) -> list[ModuleType]:
    del count  # what is known as long as no module is loaded
    loaded = [module for name, module in sys.modules.items() if name.startswith("torchmetrics.functional.")]
    return [module for module in loaded if _NAME in vars(module)]


def _asked_by_where(current: Current, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def normalize(tensor: Tensor, normalization: str | None) -> Tensor:
        watch = current.watch
        if not normalization or watch is None or watch.inside_unit or not watch.is_of_the_model(tensor):
            return original(tensor, normalization)
        normalized = tensor.sigmoid() if normalization == "sigmoid" else tensor.softmax(1)
        return torch.where(((tensor < 0) | (tensor > 1)).any(), normalized, tensor)

    return normalize
