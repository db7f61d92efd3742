"""The execution of Lightning's steps: a full schedule per batch, or the user's step unchanged."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_hybrid.collectives.agreement import StepBroken
from lightning_hybrid.errors import RankOutOfMemory
from lightning_hybrid.pipeline.results.gradient_handoff import GradientHandoff
from lightning_hybrid.pipeline.results.log_capture import LogCapture
from lightning_hybrid.pipeline.runtime.record_action_times_and_memory import ActionRecorder
from lightning_hybrid.schedule import Action, Kind
from lightning_hybrid.step.objects.fast_named_modules_and_parameters import modules_in, parameters_of
from lightning_hybrid.step.standins.absent_tensors import is_absent
from lightning_hybrid.strategies.execution.measure_first_activations import FirstActivations
from lightning_hybrid.strategies.logs.reduction import (
    begin_logs,
    drop_logger_calls,
    flush_logger_calls,
    log_for_all,
    log_for_replica,
)
from lightning_hybrid.strategies.options.options import weigh_by_count
from lightning_hybrid.strategies.run.build import RunOwner
from lightning_hybrid.strategies.run.run import Run
from lightning_hybrid.strategies.run.setting import Setting
from lightning_hybrid.strategies.user_code.hooks import current_hook, old_gradients_are_read, output_is_read

if TYPE_CHECKING:
    from lightning_hybrid.pipeline.step_runner_interface_and_results import MicrobatchRunner, StepResult, TrainContext
    from lightning_hybrid.strategies.out_of_memory.double_microbatches import FittingMicrobatches

    RunStep = Callable[..., StepResult]


class StepExecution:
    """Runs the user's steps: by the runner where there is one, unchanged where there is none.

    Attributes:
        recorder: Records when this rank did what in the latest training step.
        gradients_are_complete: Whether gradients are summed over stages and averaged over replicas.
        fit: Doubles the number of microbatches where they do not fit into memory; None unless the user wants it.
        is_syncing: Whether the backwards of this batch average gradients; those of accumulated batches do not.
    """

    def __init__(self, owner: RunOwner, evaluated: Iterator[int]) -> None:
        self._owner = owner
        self.recorder = ActionRecorder(owner.setting.device)
        self.gradients_are_complete = True
        self.is_syncing = True
        self._are_averages = True  # whether the latest backward that the user's step called has averaged gradients
        self._evaluated = evaluated
        self._activations = FirstActivations(owner.setting)
        self._finish_logs: Callable[[], Callable[[], None]] | None = None
        self.fit: FittingMicrobatches | None = None
        self._until_backward = contextlib.ExitStack()  # a forward and its recomputation are both compiled

    @property
    def _run(self) -> Run:
        return self._owner.run

    @property
    def _setting(self) -> Setting:
        return self._owner.setting

    # -- training -----------------------------------------------------------------------------------------------------

    def training_step(self, args: Sequence[Any], run_step: RunStep) -> Any:
        """Run the full schedule, forward and backward, by ``run_step`` (that of this object, or a wrapper of it)."""
        self.recorder.begin()
        self._activations.begin(args)
        buffers = self._owner.optimization.buffers
        if buffers is not None:
            buffers.share()
            buffers.after_step(averaged=self.is_syncing)
        with self._synced_norms():
            if self._run.runner is None:
                return self._plain_step("training_step", args)
            if not self._setting.is_manual:
                return self._scheduled_step(args, self._run.runner, run_step)
            # The user's step calls backwards and optimizers itself, on what this rank runs of the batch.
            with self._run.active.user_step(lambda: self._are_averages):
                return run_step("training_step", args, None, manual_optimization=True).output

    def _synced_norms(self) -> AbstractContextManager[None]:
        norms = self._setting.norms
        return nullcontext() if norms is None else norms.running()

    def _scheduled_step(self, args: Sequence[Any], runner: MicrobatchRunner, run_step: RunStep) -> Any:
        from lightning_hybrid.pipeline.step_runner_interface_and_results import TrainContext

        setting, trainer = self._setting, self._setting.trainer
        accumulated = trainer.accumulate_grad_batches
        seed_factor = setting.mesh_precision.loss_scale / accumulated
        # Where Lightning will run no backward (SWA's last pass, for BatchNorm), gradients are never handed over.
        unused = trainer.fit_loop._skip_backward
        is_first = trainer.fit_loop.epoch_loop.batch_idx % accumulated == 0
        is_guarded = self.fit is not None and self.fit.begin(runner, args[0])
        tied = self._owner.optimization.tied
        deposit = GradientHandoff(
            [p for _, p in parameters_of(modules_in(setting.module)) if not is_absent(p)],
            zeroed_before_backward=is_first or unused,
            expected_seed=seed_factor,
            shown=unused or old_gradients_are_read(trainer),
            can_roll_back=runner.can_roll_back_step or is_guarded,
            summed_later=None if self.is_syncing or tied is None else tied.num_owners(),
        )
        restores = [each.kept() for each in self._run.techniques] if runner.can_roll_back_step else []
        weight = setting.options.microbatch_weight
        weigh = None if weight is None else partial(weigh_by_count, count=weight, mesh=self._run.mesh)
        if (steps := self._owner.optimization.in_backward) is not None:
            may_run_again = runner.can_roll_back_step or self._run.fallback is not None
            steps.is_allowed = self.is_syncing and not unused and not may_run_again
        callbacks = self._before_backward, self._after_backward, self._reduce_stage
        train = TrainContext(seed_factor, *callbacks, self.recorder, weigh, self._activations.measure)
        out_of_memory: RankOutOfMemory | None = None
        try:
            result = run_step("training_step", args, train)
        except RankOutOfMemory as error:
            out_of_memory = error
        except StepBroken as broken:
            for restore in restores:
                restore()
            deposit.undo()
            broken.arguments = args
            raise
        if out_of_memory is not None:
            deposit.undo()
            self.abandon()
            if self.fit is None:
                raise out_of_memory
            self.fit.double(runner, args[0], out_of_memory)
            return self._scheduled_step(args, runner, run_step)
        if result.was_rolled_back:
            for restore in restores:
                restore()
            deposit.undo()
            return self._scheduled_step(args, runner, run_step)
        self._complete_gradients()
        if result.loss is None:  # no microbatch has one
            return result.output
        loss = deposit.wrap(result.loss)
        return {**result.output, "loss": loss} if isinstance(result.output, Mapping) else loss

    def _complete_gradients(self) -> None:
        """Sum the gradients over stages and average them over replicas, where the schedule has not."""
        self.gradients_are_complete = self.is_syncing
        if not self.is_syncing:
            return
        run, optimization = self._run, self._owner.optimization
        if optimization.tied is not None:
            optimization.tied.sum_gradients()
        if not run.active.reduces_gradients:
            start = self.recorder.mark()
            if optimization.in_backward is None or run.plain_runner is None:
                optimization.reducers[None].reduce()
            else:
                optimization.reducers[None].finish()
            if run.plain_runner is not None and run.mesh.size("data") > 1:  # schedules have their own reductions
                self.recorder.add(Action(Kind.REDUCE, 0), start)
        run.active.complete_gradients()

    def _before_backward(self, stage: int, is_last: bool) -> None:
        active, reducers = self._run.active, self._owner.optimization.reducers
        if (steps := self._owner.optimization.in_backward) is not None:
            steps.begin_backward(is_last=is_last)
            if not active.reduces_gradients and is_last and self._run.plain_runner is not None and self.is_syncing:
                reducers[None].arm()  # otherwise averaged after the step
        active.before_backward(stage, is_last)
        if not active.reduces_gradients and is_last and self.is_syncing and stage in reducers:
            reducers[stage].arm()

    def _after_backward(self, stage: int, is_last: bool) -> None:
        self._run.active.after_backward(stage, is_last)

    def _reduce_stage(self, stage: int) -> None:
        reducers = self._owner.optimization.reducers
        if self.is_syncing and stage in reducers:
            reducers[stage].finish()

    # -- any step -----------------------------------------------------------------------------------------------------

    def run_step(
        self, name: str, args: Sequence[Any], train: TrainContext | None, *, manual_optimization: bool = False
    ) -> Any:
        """Run a step of the user by the runner, and log once what its microbatches logged.

        Args:
            name: Of the step, such as "training_step".
            args: Of the user's step, the batch first.
            train: How to run its backwards, if it has any.
            manual_optimization: Whether the step calls its backwards itself.

        Returns:
            The `StepResult`.
        """
        run, setting = self._run, self._setting
        module, runner = setting.module, run.runner
        assert runner is not None
        trains = train is not None or manual_optimization
        setting.world.passes()
        # Training batches are numbered over the whole run, also a resumed one: their numbers key what they draw.
        number = setting.trainer.fit_loop.epoch_loop.total_batch_idx if trains else -1 - next(self._evaluated)
        share = name == "predict_step" or output_is_read(setting.trainer, name)
        backwards = runner.num_backwards(args[0]) if train is not None else 0
        fit = self.fit if train is not None else None

        def run_gathered() -> StepResult:
            with nullcontext() if manual_optimization else run.gathered(backwards):
                result = runner.run(
                    name,
                    getattr(module, name),
                    args,
                    step_number=number,
                    context=run.context(name),
                    train=train,
                    share_output=share,
                    manual_optimization=manual_optimization,
                )
                if fit is not None:
                    fit.meet()
                flush_logger_calls(module)
                return result

        # Once for the step: each forward and backward runs code of the user.
        with setting.contexts.advice(), setting.world.as_user():
            result = run_gathered() if fit is None else fit.run(runner, run_gathered)
        if result.was_rolled_back:
            return result
        if trains:
            skipped = not manual_optimization and result.loss is None
            log_for_all(module, result.logs, setting.world.mesh, skipped=skipped)
        else:
            log_for_replica(module, result.logs, setting.world.mesh)
        return result

    def evaluate(self, name: str, args: Sequence[Any]) -> Any:
        """Run an evaluation or prediction step by a forward-only schedule; return the output for the batch."""
        run = self._run
        if run.runner is None or run.plan is None or not run.plan.is_partitioned:
            return self._plain_step(name, args)
        return self.run_step(name, args, None).output

    def _plain_step(self, name: str, args: Sequence[Any]) -> Any:
        """Run the user's step without a runner, with compiled layers if there are any."""
        layers = self._run.active.part(keeps_compiled=True)
        if not layers.replaces_layers:
            return self._logged_step(name, args)
        self._until_backward.close()
        with contextlib.ExitStack() as stack:
            stack.enter_context(layers.running())
            output = self._logged_step(name, args)
            if name == "training_step":
                self._until_backward = stack.pop_all()
        return output

    def _logged_step(self, name: str, args: Sequence[Any]) -> Any:
        """Run the user's step unchanged; only its logs are captured, to be the same on every rank."""
        setting, context = self._setting, self._run.context(name)
        module, mesh = setting.module, setting.world.mesh
        if mesh.layout.world_size == 1:
            with context():
                return getattr(module, name)(*args)
        logs = LogCapture(1)
        with context(), logs.microbatch(module, 0):
            output = getattr(module, name)(*args)
        logged = [(entry, entry.values[0]) for entry in logs.entries()]
        if name != "training_step":
            log_for_replica(module, logged, mesh)
            return output
        skipped = module.automatic_optimization and output is None
        finish = begin_logs(module, logged, mesh, skipped=skipped)
        if module.automatic_optimization and not skipped and not setting.trainer.fit_loop._skip_backward:
            self._finish_logs = finish  # after the backward, which hides the reduction
        else:
            finish()()
        if skipped and self.is_syncing and setting.trainer.accumulate_grad_batches > 1:
            # Gradients of earlier batches, which no backward averages now.
            self._owner.optimization.reducers[None].reduce()
        return output

    # -- the backward that Lightning calls ----------------------------------------------------------------------------

    def backward(
        self, loss: Tensor, optimizer: Optimizer | None, *args: Any, then: Callable[[], None], **kwargs: Any
    ) -> Tensor:
        """Run Lightning's backward of a scalar loss, average gradients before hooks see them, as DDP, call ``then``."""
        module, plugin, guards = self._setting.module, self._setting.precision, self._run.guards
        is_plain = self._run.runner is None or self._setting.is_manual
        if is_plain:
            self.recorder.add_since_last(Action(Kind.F, 0, 0))
            self._activations.measure(loss)
        on_shards = guards.off if guards is not None and self._setting.is_manual else nullcontext
        with on_shards():
            self._before_plain_backward()
        loss = plugin.pre_backward(loss, module)
        with on_shards():  # also the averages: a reducer that read full gradients would average those
            with self._synced_norms():  # layers that are recomputed take statistics once more
                plugin.backward(loss, module, optimizer, *args, **kwargs)
            if is_plain:
                self.recorder.add_since_last(Action(Kind.B, 0, 0))
            self._after_plain_backward()
        if (connected := self._owner.optimization.connected) is not None:
            connected.is_averaging = True
        then()
        return plugin.post_backward(loss, module)

    def _before_plain_backward(self) -> None:
        """Arm the reducers where the step itself has run no backward: this one completes the gradients."""
        if (self._run.runner is None or self._setting.is_manual) and self.is_syncing:
            if (steps := self._owner.optimization.in_backward) is not None:
                steps.is_allowed = True
                steps.begin_backward(is_last=True)
            for reducer in self._owner.optimization.reducers.values():
                reducer.arm()

    def _after_plain_backward(self) -> None:
        """Wait for the logs of replicas, which show if one takes no part, then for the reduction."""
        self._until_backward.close()
        log, self._finish_logs = None if self._finish_logs is None else self._finish_logs(), None
        run = self._run
        self._are_averages = self.is_syncing
        if (run.runner is None or self._setting.is_manual) and self.is_syncing:
            for reducer in self._owner.optimization.reducers.values():
                reducer.finish()
            if run.mesh.size("data") > 1:
                self.recorder.add_since_last(Action(Kind.REDUCE, 0))
            run.active.complete_gradients()
        if log is not None:  # replicas may ask each other again, now that all have come to the same line
            with current_hook(self._setting.module, "training_step"):
                log()

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Keep gradients local inside: they are accumulated over batches."""
        self.is_syncing = False
        try:
            yield
        finally:
            self.is_syncing = True

    def abandon(self) -> None:
        """End a step that has run out of memory on some rank; on all ranks, when none waits for another."""
        self._until_backward.close()
        self._finish_logs = None
        drop_logger_calls(self._setting.module)
        for reducer in self._owner.optimization.reducers.values():
            reducer.abandon()

    def close(self) -> None:
        """Restore the layers at the end of a layout."""
        self._until_backward.close()
