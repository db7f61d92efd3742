"""Changes of the layout in a run: when start hooks have completed a step, or no pipeline can run it any more.

The first step is recorded when the run is set up. Hooks of the module and its callbacks run after that, and may set
what the step needs; a step may also initialise itself in its first batch. So a step that could not be recorded is tried
again before each of the first two training batches. And a step that takes a trace which cannot be recorded, or
partitioned as the others were, runs on shards from that batch on. Between two batches no message is under way: the
module becomes full on each rank, as at the end of a run, and is partitioned again; optimizer states and gradients are
carried over.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn

from lightning_hybrid.collectives.agreement import StepBroken
from lightning_hybrid.errors import BatchError, StepError
from lightning_hybrid.layout import ParallelLayout
from lightning_hybrid.pipeline.stages.training import Backwards
from lightning_hybrid.randomness.keyed import KeyedRandomness
from lightning_hybrid.run.build import OwnedByRun, RunOwner
from lightning_hybrid.run.execution.steps import Attempt, StepExecution, StepPolicy
from lightning_hybrid.run.setting import Setting
from lightning_hybrid.strategies.options.options import Options
from lightning_hybrid.strategies.user_code.hooks import step_arguments

if TYPE_CHECKING:
    from lightning_hybrid.callbacks.lost_time.cuts import RebalancedCuts
    from lightning_hybrid.pipeline.staged import StepRunner


class LayoutChooser(OwnedByRun, StepPolicy):
    """Checks before each training batch that the layout can run it, and changes the layout otherwise.

    Attributes:
        pipelined_batches: The first training batch of the run that ran in stages, and the first after them that did
            not; 0 and None unless the layout has changed.
    """

    def __init__(self, owner: RunOwner, execution: StepExecution) -> None:
        self.pipelined_batches: tuple[int, int | None] = (0, None)
        super().__init__(owner)
        self._execution = execution
        # Training batches that may still show that the step can be partitioned: what the start hooks set comes after
        # the first recording, and so does what the first batch sets.
        is_tried = owner.setting.is_fitting and owner.setting.needs_runner and not owner.setting.is_manual
        self._num_tries = 2 if is_tried else 0
        self._in_optimizer_step = False
        self._is_unsplit = False  # whether batches of any replica are not split, as all replicas know
        self._broken_batch: int | None = None  # number of the last batch in which the step left its trace

    @property
    def may_retry(self) -> bool:
        """Whether a training batch may still show that the step can be partitioned."""
        return self._num_tries > 0

    def restrict(self, may_retry: bool) -> None:
        """Try no further batches unless they may show something, which a recording has found out."""
        self._num_tries *= may_retry

    @property
    def _batches(self) -> int:
        """Number of the training batch in the run."""
        return int(self.setting.trainer.fit_loop.epoch_loop.total_batch_idx)

    # -- Lightning's hooks --------------------------------------------------------------------------------------------

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Change the layout if this batch requires another; runs after hooks of the user."""
        module, runner, fallback = self.setting.module, self.run.runner, self.run.fallback
        if fallback is not None:
            fallback.has_run()
        if not module.automatic_optimization or runner is None:
            return
        # The first batch of an epoch, and the batches 1, 2, 4, ... of the run.
        is_inspected = not self.setting.trainer.fit_loop.epoch_loop.batch_idx or self._batches.bit_count() == 1
        if (plain := self.run.plain_runner) is not None and is_inspected:
            plain.recheck_weighting()
        if self.run.is_pipelined:
            arguments = step_arguments(module, "training_step", batch, batch_idx)
            if pending_cuts(self.setting.trainer) is None or self._has_list_optimizers:
                self._keep_pipelined(arguments)
            else:
                self._rebalance(arguments)
        elif self._num_tries and self.run.fallback is not None:
            with self.setting.world.as_launcher():
                self._try_to_partition(step_arguments(module, "training_step", batch, batch_idx))
        self._num_tries = max(0, self._num_tries - 1)

    def on_train_end(self) -> None:
        """Announce the fallback of a run so short that no batch was left to try the step."""
        fallback = self.run.fallback
        if fallback is None:
            return
        fallback.has_run()
        if self._num_tries and self._batches >= 0:
            self._num_tries = 0
            fallback.announce()

    def recovers(self, attempt: Attempt, error: Exception) -> bool:
        """Let a step that has left its trace run again by another trace, or in another layout."""
        if not isinstance(error, StepBroken) or self._in_optimizer_step:  # of which no line must go on
            return False
        self._go_on_after(error)
        return True

    def optimizer_step(self, step: Callable[[], Any]) -> Any:
        """Run the optimizer's step, with the training step inside; where that breaks, repeat both."""
        module = self.setting.module
        hook = module._current_fx_name
        while True:
            before, self._in_optimizer_step = self._in_optimizer_step, True
            try:
                return step()
            except StepBroken as broken:
                failure = broken
            finally:
                self._in_optimizer_step = before
            module._current_fx_name = hook
            self._go_on_after(failure)

    # -- pipelined ----------------------------------------------------------------------------------------------------

    def _go_on_after(self, broken: StepBroken) -> None:
        """Let a step that has left its trace run again: by another trace if a dry run finds one, else on shards."""
        is_first, self._broken_batch = self._broken_batch != self._batches, self._batches
        if not (is_first and self._takes_other_traces(broken)):
            self._leave_pipeline(broken.reason, broken.arguments)

    def _takes_other_traces(self, broken: StepBroken) -> bool:
        """Select other traces for the batch; returns whether all ranks have found some."""
        runner, world, error = self._staged_runner, self.setting.world, None
        runner.select_by_dry_runs("training_step")
        try:
            self._choose_trace(broken.arguments)
        except Exception as raised:
            error = raised
        with world.as_launcher():
            return not world.decide(error is not None or runner.follows_again(broken), all_ranks=False)

    def _leave_pipeline(self, reason: Exception | None, arguments: Sequence[Any]) -> None:
        if self._has_list_optimizers:
            raise reason or RuntimeError("training_step has changed on another rank")
        if reason is not None:
            reason = reason.with_traceback(None)
            gc.collect()  # its frames held the graph of the step, which refers to parameters of other shapes
        self._num_tries = 0
        world = self.setting.world
        with world.as_launcher():
            world.rendezvous("a change of the layout")
            self._change_layout(arguments, world.first_reason(reason))

    @property
    def _staged_runner(self) -> StepRunner:
        runner = self.run.staged_runner
        assert runner is not None  # steps run in stages
        return runner

    @property
    def _has_list_optimizers(self) -> bool:
        from lightning_hybrid.strategies.user_code.optimizers import (
            keeps_lists_per_parameter,
        )

        return any(map(keeps_lists_per_parameter, self.setting.trainer.optimizers))

    def _keep_pipelined(self, arguments: Sequence[Any]) -> None:
        """Select the trace variant of the batch; if there is none, change the layout on all ranks."""
        error: Exception | None = None
        world = self.setting.world
        # All ranks of a replica run the same Python on the same batch; other replicas have other batches.
        has_replicas = world.mesh.size("data") > 1
        try:
            self._choose_trace(arguments)
        except BatchError:
            raise
        except Exception as raised:
            if self._has_list_optimizers or (not has_replicas and world.progress.fails_alone()):
                raise
            error = raised
        if has_replicas:
            runner, was_split = self._staged_runner, not self._is_unsplit
            with world.as_launcher():
                fails, self._is_unsplit = world.any_of(error is not None, "training_step" in runner.unsplit_step_names)
            if self._is_unsplit and was_split and not fails:
                runner.run_unsplit("training_step")
                self._keep_pipelined(arguments)
                return
        else:
            fails = error is not None
        with world.as_launcher():
            if not fails:
                return
            world.rendezvous("a change of the layout")
            self._change_layout(arguments, "" if self._num_tries else world.first_reason(error))

    def _rebalance(self, arguments: Sequence[Any]) -> None:
        """Partition the module anew, at the cuts that measured steps have chosen on all ranks."""
        with self.setting.world.as_launcher():
            self.setting.world.rendezvous("a change of the layout")
            self._owner.use_options(with_pending_cuts(self.setting))
            self._change_layout(arguments, "")

    def _choose_trace(self, arguments: Sequence[Any]) -> None:
        with self.setting.contexts.training_step_hook():
            call = self._execution.call("training_step", arguments, Backwards())
            self._staged_runner.select_next_traces(call, self._gathered_for_new_traces)

    @contextlib.contextmanager
    def _gathered_for_new_traces(self, is_recorded: bool) -> Iterator[None]:
        """Gather parameters for a dry run; all ranks join if the batch of any replica is new."""
        if not (self.run.gathered_shardings and self.setting.world.any_replica(not is_recorded)):
            yield
            return
        failure: Exception | None = None
        with self.run.gathered():  # whose end is collective, also where no trace is found
            try:
                yield
            except Exception as error:
                failure = error
        if failure is not None:
            raise failure

    # -- in shards, until the step is complete ------------------------------------------------------------------------

    def _try_to_partition(self, arguments: Sequence[Any]) -> None:
        fallback, world, left = self.run.fallback, self.setting.world, None
        assert fallback is not None
        if (runner := self.run.plain_runner) is not None and runner.stores_rows_of_samples:
            left = StepError(
                "training_step leaves tensors on its module that may have a row for each sample", entry="rows-on-module"
            )
        # Replicas record together or not at all.
        reason = world.first_reason(left) or world.first_reason(self._why_not_partitionable(arguments))
        if not reason:
            self._change_layout(arguments, "")
        elif self._num_tries == 1 or self.setting.options.strict_layout:
            fallback.announce(reason=reason)

    def _why_not_partitionable(self, arguments: Sequence[Any]) -> Exception | None:
        """Return why the step cannot be recorded and partitioned as it is now; discards the recording."""
        setting, metrics = self.setting, self.run.metrics
        world = setting.world
        from lightning_hybrid.pipeline.plain import PlainRunner
        from lightning_hybrid.run.runner import make_runner

        assert metrics is not None
        randomness = KeyedRandomness(setting.seed, setting.device)
        _, runner = make_runner(setting, world.mesh, randomness, metrics, self)
        call = self._execution.call("training_step", arguments, Backwards())
        try:
            with setting.contexts.training_step_hook():
                if isinstance(runner, PlainRunner):
                    return runner.why_not_recordable(call)
                runner.record(call)
        except Exception as error:
            return error
        return None

    def _change_layout(self, arguments: Sequence[Any], refusal: str) -> None:
        was_pipelined = self.run.is_pipelined
        self.restrict(self._owner.change_layout(arguments, refusal, may_retry=self.may_retry))
        if not self.run.is_pipelined:
            self.pipelined_batches = self.pipelined_batches[0], self._batches or None
        elif not was_pipelined:
            self.pipelined_batches = self._batches, None


def with_cuts_of_checkpoint(trainer: pl.Trainer, options: Options, layout: ParallelLayout) -> Options:
    """Return the options of a run, with the cuts that the run which it resumes has chosen."""
    if trainer.state.fn != TrainerFn.FITTING or layout.pipeline_parallel_size == 1:
        return options
    num_ranks = layout.pipeline_parallel_size
    for chosen in _chosen(trainer):
        widths = chosen.widths if options.stage_widths == "auto" else options.stage_widths
        num_stages = len(widths or ()) if sum(widths or ()) == num_ranks else num_ranks * options.stages_per_rank
        cuts = chosen.cuts_of_start(trainer.lightning_module, options.pipeline_cuts, num_stages)
        if cuts is not None:
            return dataclasses.replace(options, pipeline_cuts=cuts, stage_widths=widths)
    return options


def pending_cuts(trainer: pl.Trainer) -> Sequence[str] | None:
    """Return the cuts with which the next epoch begins; None if its stages stay, or at another batch of an epoch."""
    if trainer.fit_loop.epoch_loop.batch_idx:
        return None
    chosen = (cuts for cuts in _chosen(trainer) if cuts.can_change_in_run(trainer))
    return next((cuts.pending for cuts in chosen if cuts.pending is not None), None)


def with_pending_cuts(setting: Setting) -> Options:
    """Return the options of a run with the pending cuts, which are no longer pending."""
    options = dataclasses.replace(setting.options, pipeline_cuts=pending_cuts(setting.trainer))
    for chosen in _chosen(setting.trainer):
        chosen.applied()
        if options.stage_widths == "auto":  # the cuts are for these widths
            options = dataclasses.replace(options, stage_widths=chosen.widths)
    return options


def _chosen(trainer: Any) -> Iterator[RebalancedCuts]:
    for callback in trainer.callbacks:
        if (cuts := getattr(callback, "rebalanced_cuts", None)) is not None:
            yield cuts
