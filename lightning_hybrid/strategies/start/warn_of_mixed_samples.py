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
            found, is_recorded = _measured(module, runner, some, rest, randomness, context, agree)
    finally:
        uncompiled.off()
    weighting = agree_on_weighting(None, found)
    is_recorded = trainer.strategy.reduce_boolean_decision(is_recorded)
    runner.adopt_weighting(weighting, has_recorded_means=is_recorded)
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
) -> tuple[LossWeighting, bool]:
    """How the halves of a batch weigh in its loss and gradients, and whether by the means that are recorded."""

    def step(part: Any) -> Any:
        return module.training_step(part, *rest)

    found = measure_weighting(module, step, batch, 2, None, randomness, context)
    compared = runner.compare_recorded_means(module.training_step, [batch, *rest], context)
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
    one, parts, samples, losses = found.first_with_weights(halves(batch, 2))
    gradients = compare_gradients(
        *(module, step, one, parts, samples, losses, randomness, context, contextlib.nullcontext, agree),
        is_nonlinear=runner.has_nonlinear_backward,
    )
    if found.counts or not (uses_means and runner.has_weighted_means):  # recorded means weigh each term of the loss
        found = found.with_gradients(gradients)
    return found, uses_means
