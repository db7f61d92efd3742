"""The first recording of a step, before its run begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_hybrid.errors import UnfitError
from lightning_hybrid.pipeline.step_runner_interface_and_results import MicrobatchRunner
from lightning_hybrid.step.batch.split_batch_into_microbatches import BatchSplitter, check_count, why_unsplit
from lightning_hybrid.step.module_state.state_snapshots_and_reachable_leaves import ModuleSnapshot
from lightning_hybrid.step.tracing.user_compiled_modules import compiled_wrappers
from lightning_hybrid.strategies.start.example_batch import take_example
from lightning_hybrid.strategies.start.provisional_optimizers import record_with_optimizers
from lightning_hybrid.strategies.user_code.step_arguments_and_current_hook import current_hook, step_arguments

_STEPS: dict[TrainerFn, tuple[str, Literal["max_size_cycle", "sequential"]]] = {
    TrainerFn.FITTING: ("training_step", "max_size_cycle"),
    TrainerFn.VALIDATING: ("validation_step", "sequential"),
    TrainerFn.TESTING: ("test_step", "sequential"),
    TrainerFn.PREDICTING: ("predict_step", "sequential"),
}


def record_first_step(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    runner: MicrobatchRunner,
    *,
    example: Any,
    arguments: Sequence[Any] | None = None,
    num_microbatches: int | None,
    splitter: BatchSplitter | None,
    context: Callable[[str], Callable[[], AbstractContextManager[Any]]],
) -> Sequence[Any] | None:
    """Record the step of this run's kind on an example batch; the recording decides the partition.

    Args:
        trainer: About to run.
        module: The user's full module.
        runner: Of this run.
        example: The user's example batch; drawn from the run's own loader if None.
        arguments: Of the training step that comes next, in a run that has begun; the example is not used then.
        num_microbatches: The user's option.
        splitter: The user's option.
        context: Returns the context in which each step runs, by its name.

    Returns:
        The arguments of the step; None where the module has no such step, or it cannot be partitioned.

    Raises:
        BatchError: The batch cannot be split as the options require.
        StepError: A training step cannot be recorded.
        PartitionError: It cannot be partitioned, or not as the options require.
    """
    assert trainer.state.fn is not None
    name, mode = _STEPS[TrainerFn(trainer.state.fn)]
    if not is_overridden(name, module):
        return None
    before: list[ModuleSnapshot] = []  # transfer hooks of the user run for the example, and again in the run
    if arguments is None:
        batch = example if example is not None else take_example(trainer, trainer._active_loop, mode, before)
        arguments = step_arguments(module, name, batch)
        optimizers_exist = False
    else:
        batch, optimizers_exist = arguments[0], True
    is_fitting = name == "training_step"
    if is_fitting:  # evaluation takes as many microbatches as there are samples
        check_count(batch, num_microbatches)
    reason = why_unsplit(batch, splitter)
    if reason and runner.plan.num_ranks > 1:
        rank_zero_warn(
            f"the batch cannot be split into microbatches: {reason}; the {runner.plan.num_ranks} pipeline ranks work"
            " one after the other. Pass batch_splitter=function(batch, count) -> list of batches"
        )
    record = partial(runner.record, name, getattr(module, name), arguments, context(name))
    is_recorded = _record(trainer, module, runner, name, record, optimizers_exist=optimizers_exist)
    for state in before:
        state.restore()
    if not is_recorded:
        return None
    _warn_of_compiled(module, runner)
    return arguments


def _record(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    runner: MicrobatchRunner,
    name: str,
    record: Callable[[], None],
    *,
    optimizers_exist: bool,
) -> bool:
    """Record a step in its mode; return False where an evaluation step must run unpartitioned."""
    was_training = {inner: inner.training for inner in module.modules()}
    is_fitting = name == "training_step"
    if not is_fitting:
        module.eval()
    try:
        with torch.set_grad_enabled(is_fitting), current_hook(module, name):
            if is_fitting and not optimizers_exist:
                record_with_optimizers(trainer, module, record)
                return True
            try:
                record()
            except Exception as reason:  # an error of the step itself shows when it runs unpartitioned
                strategy: Any = trainer.strategy
                is_wrong_cut = isinstance(reason, UnfitError) and strategy.options.pipeline_cuts
                if optimizers_exist or is_wrong_cut:
                    raise
                runner.unpartitioned.add_step(name, reason)
                runner.plan.partition_by_size()
                return False
            return True
    finally:
        for inner, mode_before in was_training.items():
            inner.training = mode_before


def _warn_of_compiled(module: pl.LightningModule, runner: MicrobatchRunner) -> None:
    around = compiled_wrappers(module, runner.plan.units.values())
    if around:
        names = ", ".join(fqn or type(module).__name__ for fqn in around)
        rank_zero_warn(
            f"{names}: it is compiled as one module, and its layers run one by one under this strategy, so it runs"
            " uncompiled. Set compile='units' to compile each layer, or compile its layers yourself"
        )
