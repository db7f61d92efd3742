"""Learning-rate schedules that end before the run does, as one that is resumed with more epochs or other replicas."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint, LearningRateMonitor, ModelSummary, ProgressBar
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, IterableDataset

from lightning_hybrid.errors import add_error_note

# Lightning's callbacks that neither end a run nor change its schedules, as none of this package do.
_OBSERVERS = (Checkpoint, LearningRateMonitor, ModelSummary, ProgressBar)
_ENDS_OR_CHANGES = {"should_stop", "lr_schedulers", "lr_scheduler_configs"}
_PACKAGES = {"lightning", "pytorch_lightning", "lightning_hybrid", "torch"}
_REMEDY = (
    "or resume with the batch_size times replicas of the saved run, or give the schedule the length of your code in"
    " on_load_checkpoint (lightning-hybrid explain-error schedule-ended)"
)


def check_schedules(trainer: pl.Trainer) -> None:
    """Compare the steps of schedules with those that the run will take; the first batch comes next.

    Raises:
        ValueError: The scheduler raises before the run ends, and nothing else can end the run before.
    """
    for scheduler in _schedulers_of_steps(trainer):
        end, done = getattr(scheduler, "total_steps", None), getattr(scheduler, "last_epoch", None)
        if not isinstance(end, int) or not isinstance(done, int):
            continue
        left, coming, raises = end - done, _coming_steps(trainer), isinstance(scheduler, OneCycleLR)
        if trainer.ckpt_path and raises and coming < left:
            rank_zero_warn(
                f"{type(scheduler).__name__} has {left} of its {end} steps left, and this run takes {coming} more: it"
                f" ends before its schedule; set {_ends(trainer, left)}, {_REMEDY}"
            )
        if coming <= left or not (raises or trainer.ckpt_path):  # another schedule may be shorter on purpose
            continue
        text = (
            f"{type(scheduler).__name__} has {left} of its {end} steps left, and this run takes"
            f" {'any number of' if math.isinf(coming) else coming} more"
        )
        advice = f"; set {_ends(trainer, left)}, {_REMEDY}"
        if raises and not math.isinf(coming) and _runs_to_its_end(trainer):
            raise ValueError(f"{text}: it would raise at its step {end + 1}{advice}")
        rank_zero_warn(f"{text}{f': unless the run ends before, it raises at its step {end + 1}' * raises}{advice}")


def explain_schedule(error: BaseException, trainer: pl.Trainer) -> None:
    """Note on torch's error of a schedule that has ended what to do."""
    if isinstance(error, ValueError) and str(error).startswith("Tried to step "):
        add_error_note(
            error,
            f"the learning-rate schedule ended at global_step={trainer.global_step}, before the run: build it with"
            " total_steps=self.trainer.estimated_stepping_batches and interval 'step'; a resumed run keeps the length"
            f" that was saved: end it earlier, {_REMEDY}",
        )


def _schedulers_of_steps(trainer: pl.Trainer) -> Iterator[Any]:
    """The schedulers that Lightning steps after each step of the optimizer."""
    if trainer.lightning_module.automatic_optimization:
        yield from (c.scheduler for c in trainer.lr_scheduler_configs if c.interval == "step" and c.frequency == 1)


def _coming_steps(trainer: Any) -> float:
    """The steps of optimizers that the run still takes, unless something ends it; infinite if that is unknown."""
    loop, accumulated = trainer.fit_loop, trainer.accumulate_grad_batches
    epochs = (
        math.inf if trainer.max_epochs in (None, -1) else trainer.max_epochs - loop.epoch_progress.current.processed
    )
    # Of an epoch that is resumed in its middle.
    ready = loop.epoch_loop.batch_progress.current.ready if loop.restarting else 0
    done = ready // accumulated if ready < trainer.num_training_batches else 0
    steps = _steps_of_epoch(trainer) * epochs - done
    return steps if trainer.max_steps == -1 else min(steps, trainer.max_steps - trainer.global_step)


def _steps_of_epoch(trainer: pl.Trainer) -> float:
    batches = trainer.num_training_batches
    return batches if math.isinf(batches) else math.ceil(batches / trainer.accumulate_grad_batches)


def _ends(trainer: Any, left: int) -> str:
    """The options with which the run ends with the schedule."""
    epochs = left / _steps_of_epoch(trainer)
    whole = f" or max_epochs={trainer.fit_loop.epoch_progress.current.processed + int(epochs)}"
    return f"max_steps={trainer.global_step + left}{whole * (epochs > 0 and epochs.is_integer())} to end with it"


def _runs_to_its_end(trainer: Any) -> bool:
    """Whether neither callbacks, loaders nor hooks can end the run before, or change its schedules."""
    module, loaders = trainer.lightning_module, trainer.fit_loop._combined_loader.flattened
    hooks = "lr_scheduler_step", "on_train_batch_start"
    return (
        not trainer.reload_dataloaders_every_n_epochs
        and all(_only_observes(each) for each in trainer.callbacks)
        and all(isinstance(each, DataLoader) and not isinstance(each.dataset, IterableDataset) for each in loaders)
        and not any(is_overridden(hook, module) for hook in hooks)
        and not _names_in(type(module)) & _ENDS_OR_CHANGES
    )


def _only_observes(callback: pl.Callback) -> bool:
    is_ours = type(callback).__module__.startswith("lightning_hybrid.")
    return is_ours or (isinstance(callback, _OBSERVERS) and _is_of_package(type(callback)))


def _names_in(kind: type) -> set[str]:
    """The attributes that the methods of a user's class name."""
    values = [value for base in kind.__mro__ if not _is_of_package(base) for value in vars(base).values()]
    return {name for value in values for name in getattr(getattr(value, "__code__", value), "co_names", ())}


def _is_of_package(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _PACKAGES
