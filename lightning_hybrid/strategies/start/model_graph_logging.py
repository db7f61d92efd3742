"""Logging of the model graph, traced while the module is full."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_hybrid.patching import replace


def log_full_graph(trainer: Any, module: pl.LightningModule, *, is_empty: bool) -> None:
    """Let each logger log its graph now, and not when Lightning asks: the module may be sharded then.

    A module that was built empty (``is_empty``) has no weights to trace.
    """
    for logger in trainer.loggers:
        vars(logger).pop("log_graph", None)  # of a run that failed before Lightning asked
        if not is_empty:
            logger.log_graph(module)
        elif getattr(logger, "_log_graph", False):
            rank_zero_warn(
                f"{type(logger).__name__}(log_graph=True) runs the full module on one rank, and this one was built"
                " with empty_init=True; no graph is logged: call logger.log_graph(module) after the run"
            )
        _skip_once(logger)


def _skip_once(logger: Any) -> None:
    """Skip Lightning's next call to log the graph."""

    def log_graph(*_: Any, **__: Any) -> None:
        put_back()

    put_back = replace(logger, "log_graph", log_graph)
