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
import gc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_hybrid.collectives.agreement import StepBroken
from lightning_hybrid.errors import BatchError, RankOutOfMemory, StepError
from lightning_hybrid.randomness.keyed_draws import KeyedRandomness
from lightning_hybrid.step.standins.absent_tensors import is_absent
from lightning_hybrid.strategies.execution.apply_rebalanced_cuts import apply_pending_cuts, pending_cuts
from lightning_hybrid.strategies.execution.step_execution import StepExecution
from lightning_hybrid.strategies.run.build import RunOwner
from lightning_hybrid.strategies.run.run import Run
from lightning_hybrid.strategies.run.setting import Setting
from lightning_hybrid.strategies.user_code.hooks import output_is_read, step_arguments

if TYPE_CHECKING:
    from lightning_hybrid.pipeline.step_runner_interface_and_results import StepResult, TrainContext
    from lightning_hybrid.pipeline.step_runner_without_pipeline import PlainRunner


class LayoutChooser:
    """Checks before each training batch that the layout can run it, and changes the layout otherwise.

    Attributes:
        pipelined_batches: The first training batch of the run that ran in stages, and the first after them that did
            not; 0 and None unless the layout has changed.
    """

    def __init__(self, owner: RunOwner, execution: StepExecution) -> None:
        self.pipelined_batches: tuple[int, int | None] = (0, None)
        self._owner, self._execution = owner, execution
        # Training batches that may still show that the step can be partitioned: what the start hooks set comes after
        # the first recording, and so does what the first batch sets.
        self._num_tries = 2 if owner.setting.is_fitting and owner.setting.needs_runner else 0
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
    def _run(self) -> Run:
        return self._owner.run

    @property
    def _setting(self) -> Setting:
        return self._owner.setting

    @property
    def _batches(self) -> int:
        """Number of the training batch in the run."""
        return int(self._setting.trainer.fit_loop.epoch_loop.total_batch_idx)

    # -- Lightning's hooks --------------------------------------------------------------------------------------------

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Change the layout if this batch requires another; runs after hooks of the user."""
        module, runner = self._setting.module, self._run.runner
        if not module.automatic_optimization or runner is None:
            return
        # The first batch of an epoch, and the batches 1, 2, 4, ... of the run.
        is_inspected = not self._setting.trainer.fit_loop.epoch_loop.batch_idx or self._batches.bit_count() == 1
        if (plain := self._run.plain_runner) is not None and is_inspected:
            plain.recheck_weighting()
        if self._run.is_pipelined:
            arguments = step_arguments(module, "training_step", batch, batch_idx)
            if pending_cuts(self._setting.trainer) is None or self._has_list_optimizers:
                self._keep_pipelined(arguments)
            else:
                self._rebalance(arguments)
        elif self._num_tries and self._run.fallback is not None:
            with self._setting.world.as_launcher():
                self._try_to_partition(step_arguments(module, "training_step", batch, batch_idx))
        self._num_tries = max(0, self._num_tries - 1)

    def on_train_end(self) -> None:
        """Announce the fallback of a run so short that no batch was left to try the step."""
        fallback = self._run.fallback
        if self._num_tries and fallback is not None and self._batches >= 0:
            self._num_tries = 0
            fallback.announce()

    def training_step(self, args: Sequence[Any], step: Callable[[Sequence[Any]], Any]) -> Any:
        """Run a training step; where it breaks, run it again by another trace or in another layout."""
        while True:
            try:
                return step(args)
            except StepBroken as broken:
                if self._in_optimizer_step:  # of which no line must go on
                    raise
                failure = broken
            self._go_on_after(failure)

    def optimizer_step(self, step: Callable[[], Any]) -> Any:
        """Run the optimizer's step, with the training step inside; where that breaks, repeat both."""
        module = self._setting.module
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

    def run_step(
        self, name: str, args: Sequence[Any], train: TrainContext | None, *, manual_optimization: bool = False
    ) -> StepResult:
        """Run a step; compare full batches with shares of them in the first training batch that may be shared."""
        run, runner = self._execution.run_step, self._run.plain_runner
        if train is None or runner is None:
            return run(name, args, train, manual_optimization=manual_optimization)
        if self._setting.checks_objective:
            runner.request_weighting_check(args[0])
        if not runner.needs_weighting_check:
            return run(name, args, train, manual_optimization=manual_optimization)
        if not runner.can_share_batches:
            self._decide(runner, args, is_written=False)
            return run(name, args, train, manual_optimization=manual_optimization)
        in_files = bool(self._run.active.regions)  # of which little may be in memory
        before = None if in_files else _parameter_sums(self._setting.module)
        result = run(name, args, train, manual_optimization=manual_optimization)
        self._decide(runner, args, is_written=before is None or _parameter_sums(self._setting.module) != before)
        return result

    def _decide(self, runner: PlainRunner, args: Sequence[Any], *, is_written: bool) -> None:
        setting, run, fit = self._setting, self._run, self._execution.fit

        def decide(*, has_room: bool = True) -> None:
            with setting.contexts.training_step_hook(), run.gathered():
                context, compares = run.context("training_step"), setting.checks_objective
                how = {"compares": compares, "is_written": is_written, "has_room": has_room}
                runner.decide(setting.module.training_step, args, context, **how)

        if fit is None:
            decide()
            return
        try:
            fit.guard(decide)
        except RankOutOfMemory:
            if runner.can_share_batches or fit.can_double(runner, args[0]):
                raise
            from lightning_hybrid.pipeline.loss_weights.compare_gradients import describe_uncompared

            self._execution.abandon()
            fit.guard(partial(decide, has_room=False))  # a microbatch of one sample may fit where two samples do not
            rank_zero_warn(describe_uncompared())

    # -- pipelined ----------------------------------------------------------------------------------------------------

    def _go_on_after(self, broken: StepBroken) -> None:
        """Let a step that has left its trace run again: by another trace if a dry run finds one, else on shards."""
        is_first, self._broken_batch = self._broken_batch != self._batches, self._batches
        if not (is_first and self._takes_other_traces(broken)):
            self._leave_pipeline(broken.reason, broken.arguments)

    def _takes_other_traces(self, broken: StepBroken) -> bool:
        """Select other traces for the batch; returns whether all ranks have found some."""
        runner, world, error = self._run.staged_runner, self._setting.world, None
        assert runner is not None
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
        world = self._setting.world
        with world.as_launcher():
            world.rendezvous("a change of the layout")
            self._change_layout(arguments, world.first_reason(reason))

    @property
    def _has_list_optimizers(self) -> bool:
        from lightning_hybrid.strategies.user_code.optimizers import (
            keeps_lists_per_parameter,
        )

        return any(map(keeps_lists_per_parameter, self._setting.trainer.optimizers))

    def _keep_pipelined(self, arguments: Sequence[Any]) -> None:
        """Select the trace variant of the batch; if there is none, change the layout on all ranks."""
        error: Exception | None = None
        world = self._setting.world
        # All ranks of a replica run the same Python on the same batch; other replicas have other batches.
        has_replicas = world.mesh.size("data") > 1
        try:
            self._choose_trace(arguments)
        except BatchError:
            raise
        except Exception as raised:
            if self._has_list_optimizers or (not has_replicas and world.fails_alone()):
                raise
            error = raised
        if has_replicas:
            runner, was_split = self._run.staged_runner, not self._is_unsplit
            assert runner is not None
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
        with self._setting.world.as_launcher():
            self._setting.world.rendezvous("a change of the layout")
            self._owner.setting = apply_pending_cuts(self._setting)
            self._change_layout(arguments, "")

    def _choose_trace(self, arguments: Sequence[Any]) -> None:
        setting, runner = self._setting, self._run.staged_runner
        assert runner is not None
        with setting.contexts.training_step_hook():
            runner.select_next_traces(
                setting.module.training_step,
                arguments,
                step_number=self._batches,
                context=self._run.context("training_step"),
                share_output=output_is_read(setting.trainer, "training_step"),
                around=self._gathered_for_new_traces,
            )

    @contextlib.contextmanager
    def _gathered_for_new_traces(self, is_recorded: bool) -> Iterator[None]:
        """Gather parameters for a dry run; all ranks join if the batch of any replica is new."""
        if not (self._run.gathered_shardings and self._setting.world.any_replica(not is_recorded)):
            yield
            return
        failure: Exception | None = None
        with self._run.gathered():  # whose end is collective, also where no trace is found
            try:
                yield
            except Exception as error:
                failure = error
        if failure is not None:
            raise failure

    # -- in shards, until the step is complete ------------------------------------------------------------------------

    def _try_to_partition(self, arguments: Sequence[Any]) -> None:
        fallback, world, left = self._run.fallback, self._setting.world, None
        assert fallback is not None
        if (runner := self._run.plain_runner) is not None and runner.stores_rows_of_samples:
            left = StepError(
                "training_step leaves tensors on its module that may have a row for each sample", entry="rows-on-module"
            )
        # Replicas record together or not at all.
        reason = world.first_reason(left) or world.first_reason(self._why_not_partitionable(arguments))
        if not reason:
            self._change_layout(arguments, "")
        elif self._num_tries == 1 or self._setting.options.strict_layout:
            fallback.announce(reason=reason)

    def _why_not_partitionable(self, arguments: Sequence[Any]) -> Exception | None:
        """Return why the step cannot be recorded and partitioned as it is now; discards the recording."""
        setting, metrics = self._setting, self._run.metrics
        module, world = setting.module, setting.world
        from lightning_hybrid.pipeline.step_runner_without_pipeline import PlainRunner
        from lightning_hybrid.strategies.start.runner_factory import make_runner

        assert metrics is not None
        randomness = KeyedRandomness(setting.seed, setting.device)
        _, runner = make_runner(module, world.mesh, world, setting.options, randomness, metrics)
        context = self._run.context("training_step")
        try:
            with setting.contexts.training_step_hook():
                if isinstance(runner, PlainRunner):
                    return runner.why_not_recordable("training_step", module.training_step, arguments, context)
                runner.record("training_step", module.training_step, arguments, context)
        except Exception as error:
            return error
        return None

    def _change_layout(self, arguments: Sequence[Any], refusal: str) -> None:
        was_pipelined = self._run.is_pipelined
        self.restrict(self._owner.change_layout(arguments, refusal, may_retry=self.may_retry))
        if not self._run.is_pipelined:
            self.pipelined_batches = self.pipelined_batches[0], self._batches or None
        elif not was_pipelined:
            self.pipelined_batches = self._batches, None


def _parameter_sums(module: pl.LightningModule) -> list[float]:
    """Return sums that show whether this rank's shards of parameters have changed."""
    with torch.no_grad():
        local = [parameter.detach() for parameter in module.parameters() if not is_absent(parameter)]
        return [float(torch.nan_to_num(tensor.double()).sum()) for tensor in local if not tensor.is_complex()]
