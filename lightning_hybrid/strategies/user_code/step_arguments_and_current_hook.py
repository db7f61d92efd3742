"""Steps called as Lightning calls them: with its arguments, and under the name of the current hook."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl


def step_arguments(module: pl.LightningModule, name: str, batch: Any, batch_idx: int = 0) -> tuple[Any, ...]:
    """Return the arguments with which Lightning calls a step, as far as the step takes them.

    Raises:
        ValueError: The step fetches its own batches.
    """
    takes = inspect.signature(getattr(module, name)).parameters
    if "dataloader_iter" in takes:
        raise ValueError(
            f"{name}(dataloader_iter) fetches its own batches, and a step is recorded on a given batch; take the batch"
            " as an argument"
        )
    anything = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in takes.values())
    return (batch, batch_idx) if anything or len(takes) > 1 else (batch,)


@contextlib.contextmanager
def current_hook(module: pl.LightningModule, name: str) -> Iterator[None]:
    """Set the current hook of the module, as Lightning's own calls do; ``self.log`` reads it."""
    before, module._current_fx_name = module._current_fx_name, name
    try:
        yield
    finally:
        module._current_fx_name = before
