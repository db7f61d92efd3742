"""A warning where the loss of a batch is no mean over its samples, so that microbatches have another objective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_hybrid.pipeline.loss_weights.check_loss_is_microbatch_mean import (
    LossWeighting,
    agree_on_weighting,
    describe_mixing,
    measure_weighting,
    outside,
)
from lightning_hybrid.pipeline.pipeline_step_runner import StepRunner
from lightning_hybrid.randomness.keyed_draws import KeyedRandomness
from lightning_hybrid.step.batch.split_batch_into_microbatches import split
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
    """Test on the samples of two microbatches whether their loss is a mean; collective over the world.

    Means whose counts are recorded weigh microbatches by these. All ranks have recorded the training step, this one
    with ``arguments``; it runs in ``context``.
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
        with current_hook(module, "training_step"):
            step = module.training_step
            weighting = measure_weighting(module, lambda part: step(part, *rest), some, 2, None, randomness, context)
    finally:
        uncompiled.off()
    if trainer.strategy.reduce_boolean_decision(runner.has_weighted_means, all=False):
        differing = None
        if weighting.loss is not None:
            weights = runner.candidate_weights(module.training_step, [some, *rest], context)
            differing = outside(weighting.loss, weights)
        weighting = agree_on_weighting(None, LossWeighting(differing=differing))
    else:
        weighting = runner.adopt_weighting(agree_on_weighting(None, weighting))
    if weighting.mixes and weighting.differing is not None:
        rank_zero_warn(describe_mixing(weighting.differing))
    elif weighting.counts:
        rank_zero_info(weighting.describe(batch))
