"""The first recording of a step, on an example batch, and the weights of its microbatches."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_hybrid.batch.merge import Argument
from lightning_hybrid.batch.split import (
    check_count,
    halves,
    split,
    why_unsplit,
)
from lightning_hybrid.collectives.objects import gather_on_all
from lightning_hybrid.errors import UnfitError, is_out_of_memory
from lightning_hybrid.pipeline.measure import (
    Comparison,
    LossWeighting,
    agree_on_weighting,
)
from lightning_hybrid.pipeline.runner import MicrobatchRunner
from lightning_hybrid.pipeline.staged import StepRunner
from lightning_hybrid.pipeline.stages.traces import Call
from lightning_hybrid.randomness.keyed import KeyedRandomness
from lightning_hybrid.run.setting import Setting
from lightning_hybrid.step.module_state.snapshots import ModuleSnapshot
from lightning_hybrid.step.standins.tensors import is_absent
from lightning_hybrid.step.tracing.compiled import EagerSwitch, compiled_wrappers
from lightning_hybrid.strategies.start.example_batch import take_example
from lightning_hybrid.strategies.start.provisional_optimizers import record_with_optimizers
from lightning_hybrid.strategies.user_code.hooks import current_hook, step_arguments

_STEPS: dict[TrainerFn, tuple[str, Literal["max_size_cycle", "sequential"]]] = {
    TrainerFn.FITTING: ("training_step", "max_size_cycle"),
    TrainerFn.VALIDATING: ("validation_step", "sequential"),
    TrainerFn.TESTING: ("test_step", "sequential"),
    TrainerFn.PREDICTING: ("predict_step", "sequential"),
}


def record_first_step(
    setting: Setting,
    runner: MicrobatchRunner,
    arguments: Sequence[Any] | None = None,
) -> Sequence[Any] | None:
    """Record the step of this run's kind on an example batch; the recording decides the partition.

    ``arguments`` are of the training step that comes next, in a run that has begun. Returns the arguments
    of the step; None where there is none, or it cannot be partitioned.

    Raises:
        BatchError: The batch cannot be split as the options require.
        StepError: A training step cannot be recorded.
        PartitionError: It cannot be partitioned, or not as the options require.
    """
    trainer, module, options = setting.trainer, setting.module, setting.options
    assert trainer.state.fn is not None
    name, mode = _STEPS[TrainerFn(trainer.state.fn)]
    if not is_overridden(name, module):
        return None
    before: list[ModuleSnapshot] = []  # transfer hooks of the user run for the example, and again in the run
    if arguments is None:
        batch = options.example_batch
        batch = take_example(trainer, trainer._active_loop, mode, before) if batch is None else batch
        arguments = step_arguments(module, name, batch)
        optimizers_exist = False
    else:
        batch, optimizers_exist = arguments[0], True
    if name == "training_step":  # evaluation takes as many microbatches as there are samples
        check_count(batch, options.microbatches)
    reason = why_unsplit(batch, options.batch_splitter)
    if reason and runner.plan.num_ranks > 1:
        rank_zero_warn(
            f"the batch cannot be split into microbatches: {reason}; the {runner.plan.num_ranks} pipeline ranks work"
            " one after the other. Pass batch_splitter=function(batch, count) -> list of batches"
        )
    context = setting.contexts.of(name, delays_calls=True)
    is_manual = setting.is_manual and name == "training_step"
    call = Call(name, getattr(module, name), batch, arguments[1:], context, is_manual=is_manual)
    is_recorded = _record(setting, runner, call, optimizers_exist=optimizers_exist)
    for state in before:
        state.restore()
    if not is_recorded:
        return None
    _warn_of_compiled(module, runner)
    return arguments


def _record(setting: Setting, runner: MicrobatchRunner, call: Call, *, optimizers_exist: bool) -> bool:
    """Record a step in its mode; return False where an evaluation step must run unpartitioned."""
    module, name = setting.module, call.name
    was_training = {inner: inner.training for inner in module.modules()}
    is_fitting = name == "training_step"
    if not is_fitting:
        module.eval()
    try:
        with torch.set_grad_enabled(is_fitting), current_hook(module, name):
            if is_fitting and not optimizers_exist:
                record_with_optimizers(setting.trainer, module, partial(runner.record, call))
                return True
            try:
                runner.record(call)
            except Exception as reason:  # an error of the step itself shows when it runs unpartitioned
                is_wrong_cut = isinstance(reason, UnfitError) and setting.options.pipeline_cuts
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


def warn_of_mixed_samples(setting: Setting, runner: StepRunner, call: Call) -> None:
    """Measure on the samples of two microbatches how these weigh in their loss; collective over the world.

    Where no weights give the loss of a batch, its gradients included, a warning says so, and batches are not split. All
    ranks have recorded the training step, this one by ``call``.
    """
    assert runner.plan.first is not None
    module, batch, strategy = setting.module, call.batch, setting.trainer.strategy
    count = runner.count("training_step", batch)
    is_empty = any(tensor.is_meta or is_absent(tensor) for tensor in (*module.parameters(), *module.buffers()))
    writes_parameters = not runner.plan.first.written.isdisjoint(dict(module.named_parameters()))
    is_tried = count > 1 and not (is_empty or writes_parameters)
    if not strategy.reduce_boolean_decision(is_tried):  # the step may ask other replicas
        return
    some = dataclasses.replace(call, batch=split(batch, max(1, count // 2))[0][0])
    uncompiled = EagerSwitch()
    uncompiled.on()
    try:
        with current_hook(module, "training_step"), torch.compiler.set_stance("force_eager"):
            found, is_recorded, has_room = _measured(setting, runner, some)
    finally:
        uncompiled.off()
    weighting = agree_on_weighting(None, found)
    is_recorded = strategy.reduce_boolean_decision(is_recorded)
    runner.adopt_weighting(weighting, has_recorded_means=is_recorded)
    if not strategy.reduce_boolean_decision(has_room):
        rank_zero_warn(
            "there is no memory to compare training_step on two microbatches with each of them, as each rank must hold"
            " the full model for it: they are taken to weigh by samples or by the means that are recorded"
            " (lightning-hybrid explain-error loss-uncompared)"
        )
    if why := weighting.why_unsplit():
        rank_zero_warn(why)
    elif weighting.counts:
        rank_zero_info(weighting.describe(batch))


def _measured(setting: Setting, runner: StepRunner, call: Call) -> tuple[LossWeighting, bool, bool]:
    """How the halves of a batch weigh in its loss and gradients, whether by recorded means, and if there was memory."""
    had_no_room, randomness = False, KeyedRandomness(0, setting.device)

    def largest(number: int) -> int:
        setting.world.rendezvous("a common decision", asks=False)
        return max(gather_on_all(number, setting.world.mesh.group("world")))

    def step(part: Any) -> Any:
        return call.on(part)()

    def note(error: Exception) -> bool:
        nonlocal had_no_room
        had_no_room = had_no_room or is_out_of_memory(error)
        return False

    metrics = runner.metrics.calls
    comparison = Comparison(setting.module, step, randomness, call.context, largest, note, metrics=metrics)
    with runner.metrics.step():
        found = measured = comparison.measure(call.batch, 2, None)
    compared = runner.compare_recorded_means(call, note)
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
    is_nonlinear = first is not None and (first.recording.has_functions or first.recording.has_hooks)
    with runner.metrics.step():
        weighed = comparison.with_gradients(found, halves(call.batch, 2), is_nonlinear=is_nonlinear)
    weighs_terms = uses_means and runner.has_weighted_means  # recorded means weigh each term of the loss
    if found.counts or not weighs_terms:
        found = weighed
    # Weighted by recorded means these are the batch's; the comparison above weighs parts by samples or by one count.
    means = frozenset.intersection(*(each.logged for each in compared)) if compared and uses_means else frozenset()
    keys = found.keys | {key for key in measured.keys if isinstance(key, Argument)}
    found = found._replace(
        keys=keys,
        reductions=measured.reductions,
        unexplained=tuple(each for each in measured.unexplained if each[0] not in means),
        nearest=tuple((key, "mean" if key in means else how) for key, how in measured.nearest),
        scaled=measured.scaled,
    )
    return found, uses_means, not had_no_room
