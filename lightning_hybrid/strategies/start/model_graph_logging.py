"""Logging of the model graph, traced while the module is full."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_hybrid.patching import replace


def log_full_graph(trainer: Any, module: pl.LightningModule, *, is_empty: bool) -> Callable[[], None]:
    """Let each logger log its graph now, and not when Lightning asks: the module may be sharded then.

    ``is_empty`` says whether the module was built without weights. Returns the undo: a run may fail before it asks.
    """
    undo = contextlib.ExitStack()
    for logger in trainer.loggers:
        if not is_empty:
            logger.log_graph(module)
        elif getattr(logger, "_log_graph", False):
            rank_zero_warn(
                f"{type(logger).__name__}(log_graph=True) runs the full module on one rank, and this one was built"
                " with empty_init=True; no graph is logged: call logger.log_graph(module) after the run"
            )
        undo.callback(_skip_once(logger))
    return undo.close


def _skip_once(logger: Any) -> Callable[[], None]:
    def log_graph(*_: Any, **__: Any) -> None:
        put_back()

    return (put_back := replace(logger, "log_graph", log_graph, reason="the graph is logged already"))
