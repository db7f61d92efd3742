"""Callbacks that the strategy adds to a trainer for the time of a run, and calls around its validation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl

from lightning_hybrid.patching import around


class RunCallback(pl.Callback):
    """A callback that belongs to one run; copies and pickles of a trainer's callbacks have an empty one instead."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles a plain callback."""
        del protocol
        return pl.Callback, ()

    def enter(self, trainer: Any, *, is_last: bool = False) -> Callable[[], None]:
        """Put this callback before the user's callbacks, or behind them; return a function that removes it."""
        others = [other for other in trainer.callbacks if type(other) is not type(self)]
        trainer.callbacks[:] = [*others, self] if is_last else [self, *others]

        def leave() -> None:
            trainer.callbacks[:] = [callback for callback in trainer.callbacks if callback is not self]

        return leave


class EpochMetrics(RunCallback):
    """Computes the metrics of an epoch on all ranks, before a progress bar behind it asks for one on one rank."""

    def _compute(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compute them as Lightning does after these hooks; the result is cached until more is logged."""
        _ = trainer.callback_metrics

    on_train_epoch_end = _compute
    on_validation_epoch_end = _compute
    on_test_epoch_end = _compute


class FullAtTrainEnd(RunCallback):
    """Makes the module full at the end of training, before hooks of the user read it."""

    def __init__(self, owner: Any) -> None:
        """Take the owner of the run."""
        self._owner = owner

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Lightning's hook."""
        self._owner.make_full()


def around_validation(trainer: Any, begin: Callable[[], None], end: Callable[[], None]) -> Callable[[], None]:
    """Call ``begin`` in each validation, after callbacks have swapped weights, before its first batch; ``end`` after.

    Returns the undo.
    """

    def on_run_start(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        begin()

    def on_run_end(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        end()
        return original(*args, **kwargs)

    loop, undo = trainer.fit_loop.epoch_loop.val_loop, contextlib.ExitStack()
    undo.callback(around(loop, "on_run_start", on_run_start, reason="full tensors for a validation"))
    undo.callback(around(loop, "on_run_end", on_run_end, reason="full tensors for a validation"))
    return undo.close
