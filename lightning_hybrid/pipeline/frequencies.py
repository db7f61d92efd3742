"""Embeddings that divide the gradient of each index by its count in the batch: microbatches have other counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lightning_hybrid.step.tracing.mode import user_line

# The functions that can, each with the position of that argument.
_LOOKUPS: Mapping[Any, int] = {F.embedding: 5, F.embedding_bag: 5, torch.embedding: 3, torch.embedding_bag: 3}


class FrequencyScaling(TorchFunctionMode):
    """Notes whether what runs inside divides gradients by counts over the batch.

    Attributes:
        line: The line of the first such lookup; "" if there was none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.line = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        position = _LOOKUPS.get(func, len(args))
        if kwargs.get("scale_grad_by_freq", position < len(args) and args[position]):
            self.line = self.line or user_line()
        return func(*args, **kwargs)
