"""The weights of microbatches in the loss of their batch, measured before a run in stages; without such, no split."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_hybrid.errors import is_out_of_memory
from lightning_hybrid.pipeline.loss_weights.check_loss_is_microbatch_mean import (
    LossWeighting,
    agree_on_weighting,
    measure_weighting,
)
from lightning_hybrid.pipeline.loss_weights.compare_gradients import compare_gradients
from lightning_hybrid.pipeline.pipeline_step_runner import StepRunner
from lightning_hybrid.randomness.keyed_draws import KeyedRandomness
from lightning_hybrid.step.batch.split_batch_into_microbatches import halves, split
from lightning_hybrid.step.standins.absent_tensors import is_absent
from lightning_hybrid.step.tracing.user_compiled_modules import EagerSwitch
from lightning_hybrid.strategies.user_code.step_arguments_and_current_hook import current_hook


def warn_of_mixed_samples(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    runner: StepRunner,
    arguments: Sequence[Any],
    context: Callable[[], AbstractContextManager[Any]],
) -> None:
    """Measure on the samples of two microbatches how these weigh in their loss; collective over the world.

    Where no weights give the loss of a batch, its gradients included, a warning says so, and batches are not split. All
    ranks have recorded the training step, this one with ``arguments``; it runs in ``context``.
    """
    assert runner.plan.first is not None
    batch, *rest = arguments
    count = runner.count("training_step", batch)
    is_empty = any(tensor.is_meta or is_absent(tensor) for tensor in (*module.parameters(), *module.buffers()))
    is_tried = count > 1 and not (is_empty or runner.plan.first.written)
    if not trainer.strategy.reduce_boolean_decision(is_tried):  # the step may ask other replicas
        return
    some = split(batch, max(1, count // 2))[0][0]
    randomness = KeyedRandomness(0, trainer.strategy.root_device)
    uncompiled = EagerSwitch()
    uncompiled.on()
    try:
        with current_hook(module, "training_step"), torch.compiler.set_stance("force_eager"):
            agree = partial(trainer.strategy.reduce_boolean_decision, all=False)
            found, is_recorded, has_room = _measured(module, runner, some, rest, randomness, context, agree)
    finally:
        uncompiled.off()
    weighting = agree_on_weighting(None, found)
    is_recorded = trainer.strategy.reduce_boolean_decision(is_recorded)
    runner.adopt_weighting(weighting, has_recorded_means=is_recorded)
    if not trainer.strategy.reduce_boolean_decision(has_room):
        rank_zero_warn(
            "there is no memory to compare training_step on two microbatches with each of them, as each rank must hold"
            " the full model for it: they are taken to weigh by samples or by the means that are recorded"
            " (docs/semantics/losses.md)"
        )
    if why := weighting.why_unsplit():
        rank_zero_warn(why)
    elif weighting.counts:
        rank_zero_info(weighting.describe(batch))


def _measured(
    module: pl.LightningModule,
    runner: StepRunner,
    batch: Any,
    rest: Sequence[Any],
    randomness: KeyedRandomness,
    context: Callable[[], AbstractContextManager[Any]],
    agree: Callable[[bool], bool],
) -> tuple[LossWeighting, bool, bool]:
    """How the halves of a batch weigh in its loss and gradients, whether by recorded means, and if there was memory."""
    had_no_room = False

    def step(part: Any) -> Any:
        return module.training_step(part, *rest)

    def note(error: Exception) -> bool:
        nonlocal had_no_room
        had_no_room = had_no_room or is_out_of_memory(error)
        return False

    found = measured = measure_weighting(module, step, batch, 2, None, randomness, context, note)
    compared = runner.compare_recorded_means(module.training_step, [batch, *rest], context, note)
    uses_means = True
    if not compared:
        found = LossWeighting() if runner.has_weighted_means else found
    elif all(each.agrees(each.by_means) for each in compared):
        found = LossWeighting()
    elif all(each.agrees(each.by_samples) for each in compared):
        found, uses_means = LossWeighting(), False
    elif not found.counts:
        differing = next(each for each in compared if not each.agrees(each.by_samples))
        found = LossWeighting(differing=(differing.full, differing.by_samples))
    first = runner.plan.first
    one, parts, samples, losses = found.first_with_weights(halves(batch, 2))
    gradients = compare_gradients(
        *(module, step, one, parts, samples, losses, randomness, context, contextlib.nullcontext, agree, note),
        is_nonlinear=first is not None and (first.recording.has_functions or first.recording.has_hooks),
    )
    if found.counts or not (uses_means and runner.has_weighted_means):  # recorded means weigh each term of the loss
        found = found.with_gradients(gradients)
    return found._replace(unexplained=measured.unexplained), uses_means, not had_no_room
