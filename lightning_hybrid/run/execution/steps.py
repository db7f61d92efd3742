"""The execution of Lightning's steps: a full schedule per batch, or the user's step unchanged."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer

from lightning_hybrid.collectives.agreement import StepBroken
from lightning_hybrid.errors import RankOutOfMemory, StepError
from lightning_hybrid.pipeline.logs import LogCapture
from lightning_hybrid.pipeline.runtime.gradients import GradientHandoff, expect_seed
from lightning_hybrid.pipeline.stages.training import ActionRecorder, Backwards, StepUndone
from lightning_hybrid.run.build import OwnedByRun, RunOwner
from lightning_hybrid.run.setting import Setting
from lightning_hybrid.schedule import Action, Kind
from lightning_hybrid.soft_failures import only_informs
from lightning_hybrid.step.objects.modules import modules_in, parameters_of
from lightning_hybrid.step.objects.pytree import flatten
from lightning_hybrid.step.standins.counts import bytes_saved_behind
from lightning_hybrid.step.standins.tensors import is_absent
from lightning_hybrid.step.tracing.refusals import check_scalar
from lightning_hybrid.strategies.logs.reduction import (
    Shared,
    begin_logs,
    drop_calls,
    flush_logger_calls,
    log_for_all,
    log_for_replica,
    save_checkpoints,
)
from lightning_hybrid.strategies.options.options import weigh_by_count
from lightning_hybrid.strategies.user_code.hooks import current_hook, old_gradients_are_read, output_is_read
from lightning_hybrid.strategies.world.evaluation import have_equal_batches
from lightning_hybrid.text import sized

if TYPE_CHECKING:
    from lightning_hybrid.pipeline.runner import MicrobatchRunner, StepResult
    from lightning_hybrid.pipeline.stages.traces import Call


class StepPolicy:
    """What is done about training steps besides running them; each method does nothing unless a policy needs it.

    The policies of a run stand in one list, and each part of a step goes through it in order.
    """

    def before_batch(self, args: Sequence[Any]) -> None:
        """Called before a training step with its arguments, once for all attempts at it."""

    def guards(self, runner: MicrobatchRunner, batch: Any) -> bool:
        """Whether the next attempt at the step may be undone by this policy; called on all ranks."""
        return False

    def before(self, attempt: Attempt) -> None:
        """Called before an attempt at the step; an error is one of the attempt."""

    def around(self, attempt: Attempt, run: Callable[[], StepResult]) -> Callable[[], StepResult]:
        """The function that runs the step: ``run``, or one around it."""
        return run

    def before_effects(self) -> None:
        """Called once an attempt has run on this rank, before effects that cannot be undone."""

    def after(self, attempt: Attempt) -> None:
        """Called after an attempt that all ranks have completed; an error is one of the attempt."""

    def recovers(self, attempt: Attempt, error: Exception) -> bool:
        """Change what must change, so that a step whose attempt has been undone can run again; False if this cannot."""
        return False

    def after_backward(self, *, is_complete: bool) -> None:
        """Called after a backward that Lightning calls, whose gradients are averaged if they are complete."""

    def after_batch(self, output: Any) -> None:
        """Called after a training step with its output, as Lightning gets it."""

    def explain(self, error: BaseException) -> None:
        """Add to an error that ends the fit why the step has not run again."""


class Attempt:
    """An attempt at a training step with automatic optimization.

    Attributes:
        args: The arguments of the step, the batch first.
        call: The call of the step.
        runner: Runs it.
        handoff: The gradients of the step.
    """

    def __init__(self, execution: StepExecution, args: Sequence[Any], *, is_guarded: bool) -> None:
        run, optimization, setting = execution.run, execution.optimization, execution.setting
        assert run.runner is not None
        self.args, self.runner = args, run.runner
        backwards = TrainingBackwards(execution)
        self.call = execution.call("training_step", args, backwards)
        loop, can_roll_back = setting.trainer.fit_loop, run.runner.can_roll_back_step
        # Where Lightning will run no backward (SWA's last pass, for BatchNorm), gradients are never handed over.
        unused = loop._skip_backward
        is_first = loop.epoch_loop.batch_idx % setting.trainer.accumulate_grad_batches == 0
        tied = optimization.tied
        self.handoff = GradientHandoff(
            [p for _, p in parameters_of(modules_in(setting.module)) if not is_absent(p)],
            zeroed_before_backward=is_first or unused,
            expected_seed=backwards.seed_factor,
            shown=unused or old_gradients_are_read(setting.trainer),
            can_roll_back=can_roll_back or is_guarded,
            summed_later=None if execution.is_syncing or tied is None else tied.num_owners(),
        )
        self._restores = [each.kept() for each in run.techniques] if can_roll_back else []
        if (steps := optimization.in_backward) is not None:
            may_run_again = can_roll_back or run.fallback is not None
            steps.allow(execution.is_syncing and not unused and not may_run_again)

    def undo(self) -> None:
        """Restore the gradients of earlier batches, and what averages of gradients keep between steps."""
        for restore in self._restores:
            restore()
        self.handoff.undo()


class TrainingBackwards(Backwards):
    """Connects the backwards of one training step to the gathers and reductions of a run."""

    are_run = True

    def __init__(self, execution: StepExecution) -> None:
        setting, self._execution = execution.setting, execution
        self.recorder = execution.recorder
        self.seed_factor = setting.mesh_precision.loss_scale / setting.trainer.accumulate_grad_batches
        self._weight = setting.options.microbatch_weight
        self.weighs = self._weight is not None

    def weights(self, parts: Sequence[Any]) -> list[float]:
        """The weights of microbatches, by the counts that the user gives them."""
        assert self._weight is not None
        return weigh_by_count(parts, count=self._weight, mesh=self._execution.run.mesh)

    def on_loss(self, loss: Tensor) -> None:
        """Measure the activations behind the first scalar loss."""
        self._execution.activations.measure(loss)

    def before(self, stage: int, is_last: bool) -> None:
        """Gather what the backward of a stage needs, and let reducers wait for the gradients of the last one."""
        execution, run = self._execution, self._execution.run
        active, reducers = run.active, execution.optimization.reducers
        if (steps := execution.optimization.in_backward) is not None:
            steps.begin_backward(is_last=is_last)
            if not active.reduces_gradients and is_last and run.plain_runner is not None and execution.is_syncing:
                reducers.arm(None)  # otherwise averaged after the step
        active.before_backward(stage, is_last)
        if not active.reduces_gradients and is_last and execution.is_syncing:
            reducers.arm(stage)

    def after(self, stage: int, is_last: bool) -> None:
        """Free what the backward of a stage has gathered."""
        self._execution.run.active.after_backward(stage, is_last)

    def reduce(self, stage: int) -> None:
        """Start to average the gradients of a stage."""
        if self._execution.is_syncing:
            self._execution.optimization.reducers.launch(stage)


class StepExecution(OwnedByRun):
    """Runs the user's steps: by the runner where there is one, unchanged where there is none.

    Attributes:
        policies: What is done about training steps besides.
        recorder: Records when this rank did what in the latest training step.
        activations: Measures those of the first step.
        gradients_are_complete: Whether gradients are summed over stages and averaged over replicas.
        is_syncing: Whether the backwards of this batch average gradients; those of accumulated batches do not.
    """

    def __init__(self, owner: RunOwner, evaluated: Iterator[int]) -> None:
        super().__init__(owner)
        self.policies: tuple[StepPolicy, ...] = ()
        self.recorder = ActionRecorder(owner.setting.device)
        self.activations = FirstActivations(owner.setting)
        self.gradients_are_complete = True
        self.is_syncing = True
        self._are_averages = True  # whether the latest backward that the user's step called has averaged gradients
        self._evaluated = evaluated
        self._finish_logs: Callable[[], Callable[[], None]] | None = None
        self._until_backward = contextlib.ExitStack()  # a forward and its recomputation are both compiled

    # -- training -----------------------------------------------------------------------------------------------------

    def training_step(self, args: Sequence[Any]) -> Any:
        """Run a training step, forward and backward, until its policies let it stand; return its output."""
        for policy in self.policies:
            policy.before_batch(args)
        while True:
            self._begin(args)
            runner = self.run.runner
            if runner is None or self.setting.is_manual:
                with self._synced_norms():
                    output = self._plain_step("training_step", args) if runner is None else self._manual_step(args)
                break
            is_guarded = any([policy.guards(runner, args[0]) for policy in self.policies])
            attempt = Attempt(self, args, is_guarded=is_guarded)
            try:
                with self._synced_norms():
                    for policy in self.policies:
                        policy.before(attempt)
                    # No frame of ours unless a policy adds one.
                    run: Callable[[], StepResult] = partial(self._run, attempt.call)
                    for policy in self.policies:
                        run = policy.around(attempt, run)
                    with attempt.handoff.old.refused():
                        result = run()
                    self._log(attempt.call, result)
                    for policy in self.policies:
                        policy.after(attempt)
                    output = self._output(attempt, result)
                    break
            except StepBroken as error:
                failure: Exception = error.of(args)
            except (RankOutOfMemory, StepUndone) as error:
                failure = error
            self.optimization.reducers.abandon()  # what is on the way would arrive in restored gradients
            attempt.undo()
            if isinstance(failure, RankOutOfMemory):
                self.abandon()
            recovers = isinstance(failure, StepUndone)
            if not recovers and not any(policy.recovers(attempt, failure) for policy in self.policies):
                raise failure
            del failure, attempt  # with the frames of the traceback, which hold tensors of the step
        if not self.setting.is_manual:
            check_scalar(self.setting.module, "training_step", output)
        for policy in self.policies:
            policy.after_batch(output)
        save_checkpoints(self.setting.module, is_stepped=self.optimization.in_backward is not None)
        return output

    def _begin(self, args: Sequence[Any]) -> None:
        self.recorder.begin()
        self.activations.begin(args)
        if (buffers := self.optimization.buffers) is not None:
            buffers.share()
            buffers.after_step(averaged=self.is_syncing)
        for each in self.optimization.copied:
            each.before_batch()

    def _manual_step(self, args: Sequence[Any]) -> Any:
        """Run a step that calls backwards and optimizers itself, on what this rank runs of the batch."""
        call = self.call("training_step", args, Backwards(), is_manual=True)
        with self.run.active.user_step(lambda: self._are_averages), self.optimization.full_states():
            result = self._run(call)
            self._log(call, result)
        return result.output

    def _synced_norms(self) -> AbstractContextManager[None]:
        norms = self.setting.norms
        return nullcontext() if norms is None else norms.running()

    def _output(self, attempt: Attempt, result: StepResult) -> Any:
        """Complete the gradients of a step; return its output, whose loss hands them over in its backward."""
        self._complete_gradients()
        if result.loss is None:  # no microbatch has one
            return result.output
        loss = attempt.handoff.wrap(result.loss)
        return {**result.output, "loss": loss} if isinstance(result.output, Mapping) else loss

    def _complete_gradients(self) -> None:
        """Sum the gradients over stages and average them over replicas, where the schedule has not."""
        self.gradients_are_complete = self.is_syncing
        if not self.is_syncing:
            return
        run, optimization = self.run, self.optimization
        if optimization.tied is not None:
            optimization.tied.sum_gradients()
        if not run.active.reduces_gradients:
            start = self.recorder.mark()
            if optimization.in_backward is None or run.plain_runner is None:
                optimization.reducers.arm(None)
            optimization.reducers.finish()
            if run.plain_runner is not None and run.mesh.size("data") > 1:  # schedules have their own reductions
                self.recorder.add(Action(Kind.REDUCE, 0), start)
        run.active.complete_gradients()

    def follow(self, policies: Sequence[StepPolicy]) -> None:
        """Run training steps under these policies."""
        self.policies = tuple(policies)

    # -- any step -----------------------------------------------------------------------------------------------------

    def call(self, name: str, args: Sequence[Any], backwards: Backwards, *, is_manual: bool = False) -> Call:
        """The call of a step of the user with these arguments, the batch first."""
        from lightning_hybrid.pipeline.stages.traces import Call

        # Training batches are numbered over the whole run, also a resumed one: their numbers key what they draw.
        trains, trainer = name == "training_step", self.setting.trainer
        return Call(
            name,
            getattr(self.setting.module, name),
            args[0],
            args[1:],
            self.run.context(name),
            number=trainer.fit_loop.epoch_loop.total_batch_idx if trains else -1 - next(self._evaluated),
            backwards=backwards,
            shares_output=name == "predict_step" or output_is_read(trainer, name),
            is_manual=is_manual,
        )

    def _run(self, call: Call) -> StepResult:
        """Run a step of the user by the runner."""
        run, setting = self.run, self.setting
        assert run.runner is not None
        setting.world.progress.passes(in_all_replicas=have_equal_batches(setting.trainer._active_loop))
        backwards = run.runner.num_backwards(call.batch) if call.backwards.are_run else 0
        gathered = nullcontext() if call.is_manual else run.gathered(backwards)
        guarded = nullcontext() if run.guards is None else run.guards.during_step()
        # Once for the step: each forward and backward runs code of the user.
        with setting.contexts.advice(), setting.world.as_user(), gathered, guarded:
            result = run.runner.run(call)
            if call.backwards.are_run:
                for policy in self.policies:
                    policy.before_effects()
            flush_logger_calls(setting.module)
            return result

    def _log(self, call: Call, result: StepResult) -> None:
        """Log once what the microbatches of a step have logged."""
        module, mesh = self.setting.module, self.setting.world.mesh
        axes = ("cp", "tp") if self.run.is_pipelined else ("pp", "cp", "tp")
        shared = Shared(result.digest, axes, result.output if call.is_manual else result.loss)
        if call.trains:
            log_for_all(module, result.logs, mesh, shared, skipped=not call.is_manual and result.loss is None)
        else:
            log_for_replica(module, result.logs, mesh, shared)

    def evaluate(self, name: str, args: Sequence[Any]) -> Any:
        """Run an evaluation or prediction step by a forward-only schedule; return the output for the batch."""
        run = self.run
        if run.partitioned is None:
            return self._plain_step(name, args)
        result = self._run(call := self.call(name, args, Backwards()))
        self._log(call, result)
        save_checkpoints(self.setting.module)
        return result.output

    def _plain_step(self, name: str, args: Sequence[Any]) -> Any:
        """Run the user's step without a runner; layers stay replaced until its backward, where checkpoints run them."""
        if not (active := self.run.active).replaces_layers:
            return self._logged_step(name, args)
        self._until_backward.close()
        with contextlib.ExitStack() as stack:
            stack.enter_context(active.until_backward.running())
            output = self._logged_step(name, args)
            if name == "training_step" and output is not None and not self.setting.is_manual:
                stack.enter_context(active.of_steps.running())
                self._until_backward = stack.pop_all()
        return output

    def _logged_step(self, name: str, args: Sequence[Any]) -> Any:
        """Run the user's step unchanged; only its logs are captured, to be the same on every rank."""
        setting, context = self.setting, self.run.context(name)
        module, mesh = setting.module, setting.world.mesh
        if mesh.layout.world_size == 1:
            with context():
                return getattr(module, name)(*args)
        logs = LogCapture(1)
        with context(), logs.microbatch(module, 0):
            output = getattr(module, name)(*args)
        logged = [(entry, entry.values[0]) for entry in logs.entries()]
        if name != "training_step":
            log_for_replica(module, logged, mesh, Shared())
            return output
        skipped = module.automatic_optimization and output is None
        finish = begin_logs(module, logged, mesh, Shared(output=output), skipped=skipped)
        if module.automatic_optimization and not skipped and not setting.trainer.fit_loop._skip_backward:
            self._finish_logs = finish  # after the backward, which hides the reduction
        else:
            finish()()
        if skipped and self.is_syncing and setting.trainer.accumulate_grad_batches > 1:
            # Gradients of earlier batches, which no backward averages now.
            self.optimization.reducers.arm(None)
            self.optimization.reducers.finish()
        return output

    # -- the backward that Lightning calls ----------------------------------------------------------------------------

    def backward(self, loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run Lightning's backward of a scalar loss, and average gradients before hooks see them, as DDP."""
        module, plugin, guards = self.setting.module, self.setting.precision, self.run.guards
        if kwargs.get("create_graph") and self.is_syncing and self.run.mesh.size("data") > 1:
            raise StepError(
                "manual_backward(create_graph=True): gradients become averages over the"
                f" {self.run.mesh.size('data')} replicas, which have no graph, so that a further backward would leave"
                " out what is computed from them; differentiate by torch.autograd.grad(loss, parameters,"
                " create_graph=True), add the term to the loss, and call manual_backward once",
                entry="manual-graph",
            )
        is_plain = self.run.runs_user_step
        if is_plain:
            self.recorder.add_since_last(Action(Kind.F, 0, 0))
            self.activations.measure(loss)
        on_shards = guards.off if guards is not None and self.setting.is_manual else nullcontext
        with on_shards():
            self._before_plain_backward()
        divided, loss = loss, plugin.pre_backward(loss, module)
        # Other code could scale the gradient: of a scaler, a hook on the loss, the module's own backward.
        if loss is divided and not (args or kwargs or loss._backward_hooks or is_overridden("backward", module)):
            expect_seed(divided)
        with on_shards():  # also the averages: a reducer that read full gradients would average those
            with self._synced_norms():  # layers that are recomputed take statistics once more
                plugin.backward(loss, module, optimizer, *args, **kwargs)
            if is_plain:
                self.recorder.add_since_last(Action(Kind.B, 0, 0))
            self._after_plain_backward()
        if (connected := self.optimization.connected) is not None:
            connected.has_run_backward(averages=self.is_syncing)
        for policy in self.policies:
            policy.after_backward(is_complete=self.is_syncing)
        return plugin.post_backward(loss, module)

    def _before_plain_backward(self) -> None:
        """Arm the reducers where the step itself has run no backward: this one completes the gradients."""
        if self.run.runs_user_step and self.is_syncing:
            if (steps := self.optimization.in_backward) is not None:
                steps.allow(True)
                steps.begin_backward(is_last=True)
            for reducer in self.optimization.reducers.every:
                reducer.arm()

    def _after_plain_backward(self) -> None:
        """Wait for the logs of replicas, which show if one takes no part, then for the reduction."""
        self._until_backward.close()
        log, self._finish_logs = None if self._finish_logs is None else self._finish_logs(), None
        run = self.run
        self._are_averages = self.is_syncing
        if run.runs_user_step and self.is_syncing:
            self.optimization.reducers.finish()
            if run.mesh.size("data") > 1:
                self.recorder.add_since_last(Action(Kind.REDUCE, 0))
            run.active.complete_gradients()
        if log is not None:  # replicas may ask each other again, now that all have come to the same line
            with current_hook(self.setting.module, "training_step"):
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
        drop_calls(self.setting.module)
        self.optimization.reducers.abandon()

    def explain(self, error: BaseException) -> None:
        """Add to an error that ends the fit why no step has run again."""
        for policy in self.policies:
            policy.explain(error)

    def close(self) -> None:
        """Restore the layers at the end of a layout."""
        self._until_backward.close()


class FirstActivations:
    """Prints once, on the first rank, what the first forward of a run has saved for its backward."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._is_pending = setting.is_fitting and setting.world.mesh.rank == 0
        self._batch: list[Tensor] = []

    def begin(self, arguments: Sequence[Any]) -> None:
        """Take the arguments of a training step, whose tensors are no activations."""
        if self._is_pending:
            self._batch = [leaf for leaf in flatten(list(arguments))[0] if isinstance(leaf, Tensor)]

    def measure(self, loss: Tensor) -> None:
        """Read the graph behind a scalar loss, before its backward; autograd keeps what it kept."""
        if not self._is_pending or is_absent(loss):  # while a step is recorded that calls its backwards itself
            return
        self._is_pending, batch, self._batch = False, self._batch, []
        # Only this rank measures: operations of sharded tensors would gather them, which is collective.
        with only_informs("the measured size of activations"), torch._C.DisableTorchFunctionSubclass():
            size = bytes_saved_behind(loss, self._setting.module, batch)
            what = "microbatch" if (self._setting.options.microbatches or 1) > 1 else "batch"
            rank_zero_info(f"activations of the first {what}: {sized(size)}, measured before its backward")
