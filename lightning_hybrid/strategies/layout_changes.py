"""Change a layout in a run: when start hooks have completed a step, and where no pipeline can run it any more.

The first step is recorded when the run is set up. Hooks of the module and its callbacks run after that, and may set
what the step needs; a step may also set itself up in its first batch. So a step that could not be recorded is tried
again before each of the first two training batches. And a step that takes a way that cannot be recorded, or cut as the
others were, is run in shards from that batch on. Between two batches nothing is under way: the module becomes full on
each rank, as at the end of a run, and is laid out anew; optimizer states and gradients are carried over.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer

from lightning_hybrid.collectives.rank_agreement import StepBroken
from lightning_hybrid.pipeline.microbatch_runner import StepResult, TrainContext
from lightning_hybrid.pipeline.plain_runner import PlainRunner
from lightning_hybrid.pipeline.runner import StepRunner
from lightning_hybrid.randomness.keyed_draws import KeyedRandomness
from lightning_hybrid.step.batch.microbatch import BatchError
from lightning_hybrid.step.standins.absent_tensors import is_absent
from lightning_hybrid.step.tracing.recording import StepError
from lightning_hybrid.strategies.run_setup import SetUpStrategy
from lightning_hybrid.strategies.start.runner_factory import runner_of_stages
from lightning_hybrid.strategies.state.carried_states import FullGradients, full_states
from lightning_hybrid.strategies.user_code.hook_context import current_hook, output_is_read, step_arguments
from lightning_hybrid.strategies.user_code.user_optimizers import keeps_lists_like_parameters


class ChangingStrategy(SetUpStrategy):
    """Sees before each training batch that the layout can run it.

    Attributes:
        pipelined_batches: The first training batch of the run that ran in stages, and the first after them that did
            not; 0 and None unless the layout has changed.
    """

    pipelined_batches: tuple[int, int | None] = (0, None)
    _in_optimizer_step = False

    def setup(self, trainer: pl.Trainer) -> None:
        """Set up a run."""
        self.pipelined_batches = 0, None
        super().setup(trainer)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Lightning's hook, after those of the user: change the layout if this batch shows that it must be another."""
        super().on_train_batch_start(batch, batch_idx)
        module = self.lightning_module
        assert module is not None
        if not module.automatic_optimization or self._runner is None:
            return
        loop = self._trainer.fit_loop.epoch_loop
        is_looked_at = (
            not loop.batch_idx or loop.total_batch_idx.bit_count() == 1
        )  # the first of an epoch, 1, 2, 4, ...
        if isinstance(self._runner, PlainRunner) and is_looked_at:
            self._runner.look_again()
        if self._is_pipelined:
            self._keep_pipelined(step_arguments(module, "training_step", batch, batch_idx))
        elif self._tries and self._instead:
            with self.launcher_world():
                self._try_to_cut(step_arguments(module, "training_step", batch, batch_idx))
        self._tries = max(0, self._tries - 1)

    def on_train_end(self) -> None:
        """Lightning's hook: a run so short that no batch was left to try the step says what it was."""
        super().on_train_end()
        if self._tries and self._instead and self._trainer.fit_loop.epoch_loop.total_batch_idx >= 0:
            self._tries = 0
            self._tell_of_shares()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step; where it breaks, change the layout and run it again."""
        try:
            return super().training_step(*args, **kwargs)
        except StepBroken as broken:
            if self._in_optimizer_step:  # of which no line must go on
                raise
            reason, arguments = broken.reason, broken.arguments
        self._leave_pipeline(reason, arguments)
        return super().training_step(*args, **kwargs)

    def _run(self, name: str, args: Sequence[Any], train: TrainContext | None, *, by_hand: bool = False) -> StepResult:
        """Run a step; where parts of a training batch are to run, see what they give in the first one."""
        module, runner = self.lightning_module, self._runner
        if train is None or not isinstance(runner, PlainRunner) or module is None:
            return super()._run(name, args, train, by_hand=by_hand)
        if self._compares_parts:
            runner.look_at(args[0])
        if not runner.is_undecided:
            return super()._run(name, args, train, by_hand=by_hand)
        if not runner.may_share:
            self._decide(args, is_written=False)
            return super()._run(name, args, train, by_hand=by_hand)
        in_files = self._zero is not None and bool(self._zero.regions)  # of which little may be in memory
        before = None if in_files else _sums(module)
        result = super()._run(name, args, train, by_hand=by_hand)
        self._decide(args, is_written=before is None or _sums(module) != before)
        return result

    def _decide(self, args: Sequence[Any], *, is_written: bool) -> None:
        module, runner = self.lightning_module, self._runner
        assert module is not None and isinstance(runner, PlainRunner)
        gathered = contextlib.nullcontext() if self._zero is None else self._zero.step()
        with self._in_training_step(), gathered:
            context, compares = self._context("training_step"), self._compares_parts
            runner.decide(module.training_step, args, context, compares=compares, is_written=is_written)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """Run the optimizer's step, with the training step inside; where that breaks, begin both again."""
        module = self.lightning_module
        assert module is not None
        before, self._in_optimizer_step = self._in_optimizer_step, True
        hook = module._current_fx_name
        try:
            return super().optimizer_step(optimizer, closure, *args, **kwargs)
        except StepBroken as broken:
            reason, arguments = broken.reason, broken.arguments
        finally:
            self._in_optimizer_step = before
        module._current_fx_name = hook
        self._leave_pipeline(reason, arguments)
        return super().optimizer_step(optimizer, closure, *args, **kwargs)

    def _leave_pipeline(self, reason: Exception | None, arguments: Sequence[Any]) -> None:
        if any(map(keeps_lists_like_parameters, self.optimizers)):
            raise reason or RuntimeError("training_step has changed on another rank")
        if reason is not None:
            reason = reason.with_traceback(None)
            gc.collect()  # its frames held the graph of the step, which knows parameters of other shapes
        self._tries = 0
        with self.launcher_world():
            self._meet("a change of the layout")
            self._change_layout(arguments, self._reason_of_all(reason))

    def _lay_out(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any, **kwargs: Any) -> None:
        """Lay out, and see whether steps may turn out otherwise while they run."""
        super()._lay_out(trainer, module, *args, **kwargs)
        runner, plan = self._runner, self._plan
        if not isinstance(runner, StepRunner) or trainer.state.fn != TrainerFn.FITTING or plan is None:
            return
        graph = None if plan.first is None else plan.first.assignment.graph
        # What experts exchange in the middle of a step cannot be brought to its end without it.
        is_alone = self._experts is None and not self._verify_first_step
        may_break = graph is not None and is_alone and (graph.asked or any(value.dynamic for value in graph.values))
        if self.reduce_boolean_decision(bool(may_break), all=False):
            runner.agree_broken = self._on_any_replica

    def _on_any_replica(self, broken: bool) -> bool:
        if self.mesh.size("data") == 1:
            return broken
        votes = torch.tensor(int(broken), device=self.root_device)
        return bool(self.mesh.all_reduce(votes, "data"))

    # -- pipelined ----------------------------------------------------------------------------------------------------

    def _keep_pipelined(self, arguments: Sequence[Any]) -> None:
        """Choose the recorded form of the batch; if there is none, change the layout on all ranks."""
        error: Exception | None = None
        try:
            self._foresee(arguments)
        except BatchError:
            raise
        except Exception as raised:
            if any(map(keeps_lists_like_parameters, self.optimizers)):
                raise
            error = raised
        with self.launcher_world():
            # All ranks of a replica run the same Python on the same batch; other replicas have other batches.
            has_replicas = self.mesh.size("data") > 1
            if not (self.reduce_boolean_decision(error is not None, all=False) if has_replicas else error):
                return
            self._meet("a change of the layout")
            refusal = "" if self._tries else self._reason_of_all(error)
            self._change_layout(arguments, refusal)

    def _foresee(self, arguments: Sequence[Any]) -> None:
        module, runner = self.lightning_module, self._runner
        assert module is not None and isinstance(runner, StepRunner)
        with self._in_training_step():
            runner.foresee(
                module.training_step,
                arguments,
                step_number=self._trainer.fit_loop.epoch_loop.total_batch_idx,
                context=self._context("training_step"),
                share_output=output_is_read(self._trainer, "training_step"),
                around=self._gathered_where_new,
            )

    def _gathered_where_new(self, is_known: bool) -> AbstractContextManager[None]:
        """A look at the step finds what replicas share out gathered; all take part if the batch of one is new."""
        if self._zero is None or not self._on_any_replica(not is_known):
            return contextlib.nullcontext()
        return self._zero.step()

    @contextlib.contextmanager
    def _in_training_step(self) -> Any:
        module = self.lightning_module
        assert module is not None
        with self._advised(), self.user_world(), current_hook(module, "training_step"):
            yield

    # -- in shards, until the step is complete ------------------------------------------------------------------------

    def _try_to_cut(self, arguments: Sequence[Any]) -> None:
        runner, left = self._runner, None
        if isinstance(runner, PlainRunner) and runner.has_left_rows:
            left = StepError("training_step leaves tensors on its module that may have a row for each sample")
        # Replicas record together or not at all.
        reason = self._reason_of_all(left) or self._reason_of_all(self._why_not_cut(arguments))
        if not reason:
            self._change_layout(arguments)
        elif self._tries == 1 or self.options.strict_layout:
            self._instead = f"{self._instead.partition(': ')[0]}: {reason}"
            self._tell_of_shares()

    def _why_not_cut(self, arguments: Sequence[Any]) -> Exception | None:
        """Why the step cannot be recorded and cut as it is now; nothing of this is kept."""
        module = self.lightning_module
        assert module is not None and self._seed is not None and self._metrics is not None
        pipeline = self.mesh.group("pp")
        _, runner = runner_of_stages(
            module,
            self.mesh,
            pipeline,
            self.options,
            KeyedRandomness(self._seed, self.root_device),
            replica=self.data_rank,
            metrics=self._metrics,
            parts=lambda: None,
            agree=self.broadcast,
            num_processes=self.num_processes,
            around_uncut=contextlib.nullcontext,
        )
        context = self._context("training_step")
        try:
            with self._in_training_step():
                if isinstance(runner, PlainRunner):
                    return runner.why_not_seen("training_step", module.training_step, arguments, context)
                runner.record("training_step", module.training_step, arguments, context)
        except Exception as error:
            return error
        return None

    # -- the change ---------------------------------------------------------------------------------------------------

    def _change_layout(self, arguments: Sequence[Any], refusal: str = "") -> None:
        """Lay the module out anew; collective over the world.

        Args:
            arguments: Of the training step that comes next.
            refusal: Why no pipeline can run it, where that is known.
        """
        trainer, module, was_pipelined = self._trainer, self.lightning_module, self._is_pipelined
        assert module is not None and self._plan is not None and self._metrics is not None
        self._metrics.share_all()
        states = full_states(self.optimizers, self.optimizer_state)
        gradients = FullGradients(
            module, self._plan, self._parts, self.mesh, self.root_device, are_complete=self._grads_complete
        )
        for optimizer in self.optimizers:
            optimizer.state.clear()  # what it does is tried on a copy without any
        self.make_whole()
        self._dissolve()
        self._lay_out(trainer, module, arguments, refusal)
        self._pickle_as_they_are.close()  # copies are made to see what optimizers do
        self._connect_gradients(module)
        self._pickle_in_full()
        self._stop_reads.callback(self._share_buffers(trainer, module))
        self.load_optimizer_state_dict({"optimizer_states": states})
        gradients.give(module, self._plan, self._parts)
        number = trainer.fit_loop.epoch_loop.total_batch_idx
        if not self._is_pipelined:
            self.pipelined_batches = self.pipelined_batches[0], number or None
        elif not was_pipelined:
            self.pipelined_batches = number, None


def _sums(module: pl.LightningModule) -> list[float]:
    """By which it shows whether this rank's shards of parameters have changed."""
    with torch.no_grad():
        held = [parameter.detach() for parameter in module.parameters() if not is_absent(parameter)]
        return [float(torch.nan_to_num(tensor.double()).sum()) for tensor in held if not tensor.is_complex()]
