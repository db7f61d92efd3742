"""Pipeline cuts chosen by measured steps, applied at the start of a run and of its epochs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn

from lightning_hybrid.layout import ParallelLayout
from lightning_hybrid.strategies.options.options import Options
from lightning_hybrid.strategies.run.setting import Setting

if TYPE_CHECKING:
    from lightning_hybrid.callbacks.lost_time.cuts import RebalancedCuts


def with_cuts_of_checkpoint(trainer: pl.Trainer, options: Options, layout: ParallelLayout) -> Options:
    """Return the options of a run, with the cuts that the run which it resumes has chosen.

    Args:
        trainer: Of the run; its callbacks have what the checkpoint says.
        options: The arguments of the strategy.
        layout: The parallel sizes.
    """
    if trainer.state.fn != TrainerFn.FITTING or layout.pipeline_parallel_size == 1:
        return options
    num_stages = layout.pipeline_parallel_size * options.stages_per_rank
    for chosen in _chosen(trainer):
        cuts = chosen.cuts_of_start(trainer.lightning_module, options.pipeline_cuts, num_stages)
        if cuts is not None:
            return dataclasses.replace(options, pipeline_cuts=cuts)
    return options


def pending_cuts(trainer: pl.Trainer) -> Sequence[str] | None:
    """Return the cuts with which the next epoch begins; None if its stages stay, or at another batch of an epoch."""
    if trainer.fit_loop.epoch_loop.batch_idx:
        return None
    chosen = (cuts for cuts in _chosen(trainer) if cuts.can_change_in_run(trainer))
    return next((cuts.pending for cuts in chosen if cuts.pending is not None), None)


def apply_pending_cuts(setting: Setting) -> Setting:
    """Return the setting of a run with the pending cuts, which are no longer pending."""
    options = dataclasses.replace(setting.options, pipeline_cuts=pending_cuts(setting.trainer))
    for chosen in _chosen(setting.trainer):
        chosen.applied()
    return dataclasses.replace(setting, options=options)


def _chosen(trainer: Any) -> Iterator[RebalancedCuts]:
    for callback in trainer.callbacks:
        if (cuts := getattr(callback, "rebalanced_cuts", None)) is not None:
            yield cuts
