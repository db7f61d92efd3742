"""The metrics of an epoch are computed on all ranks, before any rank alone asks for one."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from lightning_hybrid.strategies.world.run_callback import RunCallback


class EpochMetrics(RunCallback):
    """Stands first: a progress bar behind it may ask on one rank, before hooks in which that rank meets the others."""

    def __init__(self, trainer: Any) -> None:
        """Args: trainer: about to run."""
        self._trainer = trainer
        trainer.callbacks[:] = [self, *(other for other in trainer.callbacks if not isinstance(other, EpochMetrics))]

    def leave(self) -> None:
        """Undo what was done to the trainer."""
        self._trainer.callbacks[:] = [callback for callback in self._trainer.callbacks if callback is not self]

    def _compute(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Lightning does the same after these hooks; what is computed is kept until there is more of it."""
        _ = trainer.callback_metrics

    on_train_epoch_end = _compute
    on_validation_epoch_end = _compute
    on_test_epoch_end = _compute
