"""The execution of Lightning's steps: a whole schedule per batch, or the user's step as it is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from torch.optim import Optimizer

from lightning_hybrid.collectives.rank_agreement import StepBroken
from lightning_hybrid.experts.parallel.expert_parallel import SharedExperts
from lightning_hybrid.pipeline.microbatch_runner import MicrobatchRunner, StepResult, TrainContext
from lightning_hybrid.pipeline.plain_runner import PlainRunner
from lightning_hybrid.pipeline.results.gradient_handoff import Deposit
from lightning_hybrid.pipeline.results.log_capture import LogCapture
from lightning_hybrid.pipeline.runtime.error_notes import note
from lightning_hybrid.pipeline.stages.shared_parameters import SharedParameters
from lightning_hybrid.randomness.keyed_draws import KeyedRandomness
from lightning_hybrid.replicate.buffer_broadcast import ReplicaBuffers
from lightning_hybrid.replicate.synced_batch_norm import SyncedBatchNorm
from lightning_hybrid.schedule import Span
from lightning_hybrid.step.objects.module_walk import modules_in, parameters_of
from lightning_hybrid.step.recording.choose_units import choose_units
from lightning_hybrid.step.standins.absent_tensors import ControlFlowError, is_absent
from lightning_hybrid.step.tracing.recording import StepError
from lightning_hybrid.strategies.logs.log_reduction import begin_logs, log_for_all, log_for_replica
from lightning_hybrid.strategies.logs.logger_proxies import noted_loggers, tell_loggers
from lightning_hybrid.strategies.options.microbatch_weights import MicrobatchWeight, weigh_by_count
from lightning_hybrid.strategies.options.strategy_options import Options, advise
from lightning_hybrid.strategies.precision_plugins import PrecisionStrategy
from lightning_hybrid.strategies.start.empty_init import move_to_device
from lightning_hybrid.strategies.start.model_graph_logging import log_graph_of_whole
from lightning_hybrid.strategies.techniques.compilation import CompiledUnits, one_share_of_cores
from lightning_hybrid.strategies.techniques.gradient_reduction import Reducers
from lightning_hybrid.strategies.techniques.zero import hold_in_evaluation
from lightning_hybrid.strategies.user_code.hook_context import current_hook, old_gradients_are_read, output_is_read
from lightning_hybrid.strategies.world.uneven_evaluation import asked_in_common_batches
from lightning_hybrid.zero.unshard_policy import ZeroSharding


class SteppingStrategy(PrecisionStrategy):
    """Runs the user's steps: through the pipeline where there is a runner, plainly where there is none.

    Attributes:
        options: What the user asked for.
        spans: When this rank did what in the latest step.
    """

    options: Options

    def __init__(self, *, microbatch_weight: MicrobatchWeight | None, **options: Any) -> None:
        """Args: microbatch_weight: as ``Hybrid3DStrategy``. options: as ``PrecisionStrategy``."""
        super().__init__(**options)
        self._weight = microbatch_weight
        self._runner: MicrobatchRunner | None = None
        self._shared: SharedParameters | None = None
        self._reducers: Reducers = {}
        self._zero: ZeroSharding | None = None
        self._experts: SharedExperts | None = None
        self._backward_syncs = True
        self._grads_complete = True  # summed over stages and averaged over replicas
        self._evaluated = 0
        self._recomputing: Callable[[], AbstractContextManager[None]] | None = None  # where steps run as they are
        self._norms: SyncedBatchNorm | None = None
        self._replica_buffers: ReplicaBuffers | None = None
        self._finish_logs: Callable[[], Callable[[], None]] | None = None
        self._compiled: CompiledUnits | None = None
        self._compiler_config = contextlib.ExitStack()
        self._until_backward = contextlib.ExitStack()  # a forward and its recomputation are compiled alike
        self.spans: list[Span] = []

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the whole schedule, forward and backward; the backward that Lightning calls later hands over."""
        args = (*args, *kwargs.values())
        if self._replica_buffers is not None:
            self._replica_buffers.share()
            self._replica_buffers.after_step(averaged=self._backward_syncs)
        with self._synced_norms():
            if self._runner is None:
                return self._plain_step("training_step", args)
            return self._step_by_hand(args) if self._steps_by_hand else self._scheduled_step(args)

    def _step_by_hand(self, args: Sequence[Any]) -> Any:
        """The user's step, which calls backwards and optimizers itself, on what this rank runs of the batch."""
        with nullcontext() if self._zero is None else self._zero.full_step():
            return self._run("training_step", args, None, by_hand=True).output

    @property
    def _steps_by_hand(self) -> bool:
        """Whether the module calls its backwards and optimizers itself."""
        return self.lightning_module is not None and not self.lightning_module.automatic_optimization

    def _share_buffers(self, trainer: pl.Trainer, module: pl.LightningModule) -> Callable[[], None]:
        """From now on replicas have the buffers of the first where DDP has; returns what ends it."""
        if self._shard_mesh.size("data") == 1:
            return lambda: None
        self._replica_buffers = ReplicaBuffers(module, self._shard_mesh.group("data"), self.root_device)
        undo = hold_in_evaluation(trainer, self._replica_buffers.share, lambda: None)

        def end() -> None:
            self._replica_buffers = None
            undo()

        return end

    def _synced_norms(self) -> AbstractContextManager[None]:
        return nullcontext() if self._norms is None else self._norms.running()

    def _scheduled_step(self, args: Sequence[Any]) -> Any:
        module = self.lightning_module
        assert module is not None and self._runner is not None
        batch_idx = self._trainer.fit_loop.epoch_loop.batch_idx
        accumulated = self._trainer.accumulate_grad_batches
        seed_factor = self.mesh_precision.loss_scale / accumulated
        trained = [p for _, p in parameters_of(modules_in(module)) if not is_absent(p)]
        # Where Lightning will run no backward (SWA's last pass, for BatchNorm), what is set aside is never handed over.
        unused = self._trainer.fit_loop._skip_backward
        shown = unused or old_gradients_are_read(self._trainer)
        is_first = batch_idx % accumulated == 0
        deposit = Deposit(
            trained,
            zeroed_later=is_first or unused,
            seeded=seed_factor,
            shown=shown,
            restorable=self._runner.may_undo,
        )
        weigh = None if self._weight is None else partial(weigh_by_count, count=self._weight, mesh=self._shard_mesh)
        train = TrainContext(seed_factor, self._before_backward, self._after_backward, self._reduce_stage, weigh)
        try:
            result = self._run("training_step", args, train)
        except StepBroken as broken:
            deposit.undo()
            broken.arguments = args
            raise
        if result.is_undone:
            deposit.undo()
            return self._scheduled_step(args)
        self._grads_complete = self._backward_syncs
        if self._backward_syncs:
            if self._shared is not None:
                self._shared.sum_gradients()
            if self._zero is None:
                self._reducers[None].reduce()
            if self._experts is not None:
                self._experts.agree_on_gradients()
        if result.loss is None:  # no microbatch has one
            return result.output
        loss = deposit.wrap(result.loss)
        if isinstance(result.output, Mapping):
            return {**result.output, "loss": loss}
        return loss

    @property
    def _trainer(self) -> pl.Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    def model_to_device(self) -> None:
        """Move the module to this rank's device; loggers then see it, before it is in parts."""
        assert self.lightning_module is not None
        move_to_device(self.lightning_module, self.root_device)
        if self._needs_runner():
            log_graph_of_whole(self._trainer, self.lightning_module, is_empty=self._empty is not None)

    # -- what is done around units ------------------------------------------------------------------------------------

    def _compile_units(
        self, module: pl.LightningModule, options: Mapping[str, Any] | None, randomness: KeyedRandomness
    ) -> None:
        """Let the units that this rank holds run compiled from now on, if the user wants it."""
        if options is None:
            return
        in_parts, synced = self._runner is not None, self._norms is not None
        self._compiled = CompiledUnits(module, options, self.root_device, in_parts=in_parts, synced_norms=synced)
        if self._runner is None:
            self._compiled.choose()
        elif self._plan is not None:
            first = self._plan.first
            if first is not None:
                units, drawing = first.recording.units, first.recording.graph.draws
            else:  # nothing has been seen of the step
                units, drawing = choose_units(module, 1), tuple(name for name, _ in module.named_modules())
            self._compiled.choose(units, self._shards, drawing, randomness)
        self._compiler_config.enter_context(one_share_of_cores(self.num_processes))

    def _stop_compiling(self) -> None:
        self._until_backward.close()
        self._compiler_config.close()
        self._compiled = None

    @property
    def _is_compiling(self) -> bool:
        return self._compiled is not None

    @contextlib.contextmanager
    def _units(self) -> Iterator[None]:
        """Units run sharded and compiled inside."""
        sharded = nullcontext() if self._shards is None else self._shards.running()
        compiled = self._compiled.running() if self._compiled is not None and self._is_compiling else nullcontext()
        with sharded, compiled:
            yield

    # -- steps --------------------------------------------------------------------------------------------------------

    def _before_backward(self, stage: int, is_last: bool) -> None:
        if self._zero is not None:
            self._zero.before_backward(stage, is_last)
        elif is_last and self._backward_syncs and stage in self._reducers:
            self._reducers[stage].arm()

    def _after_backward(self, stage: int, is_last: bool) -> None:
        if self._zero is not None:
            self._zero.after_backward(stage, is_last)

    def _reduce_stage(self, stage: int) -> None:
        if self._backward_syncs and stage in self._reducers:
            self._reducers[stage].finish()

    def _run(self, name: str, args: Sequence[Any], train: TrainContext | None, *, by_hand: bool = False) -> StepResult:
        module, runner = self.lightning_module, self._runner
        assert module is not None and runner is not None
        trains = train is not None or by_hand
        self._evaluated += not trains
        self._passes()
        # Training batches are numbered over the whole run, also a resumed one: their numbers key what they draw.
        number = self._trainer.fit_loop.epoch_loop.total_batch_idx if trains else -1 - self._evaluated
        share = name == "predict_step" or output_is_read(self._trainer, name)
        backwards = runner.num_backwards(args[0]) if train is not None else 0
        if self._experts is not None and train is not None:
            self._experts.meet(backwards)
        gathered = nullcontext() if self._zero is None or by_hand else self._zero.step(num_microbatches=backwards)
        with self._advised(), self.user_world(), gathered:  # once: each forward and backward runs code of the user's
            result = runner.run(
                name,
                getattr(module, name),
                args,
                step_number=number,
                context=self._context(name),
                train=train,
                share_output=share,
                by_hand=by_hand,
            )
            tell_loggers(module)
        self.spans = result.spans
        if result.is_undone:
            return result
        if trains:
            skipped = not by_hand and result.loss is None
            log_for_all(module, result.logs, self.mesh, skipped=skipped)
        else:
            log_for_replica(module, result.logs, self.mesh)
        return result

    def _plain_step(self, name: str, args: Sequence[Any]) -> Any:
        if self._compiled is None:
            return self._step_alone(name, args)
        self._until_backward.close()
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._units())
            output = self._step_alone(name, args)
            if name == "training_step":
                self._until_backward = stack.pop_all()
        return output

    def _step_alone(self, name: str, args: Sequence[Any]) -> Any:
        """The user's step as it is; only what it logs is caught, to be the same on every rank."""
        module = self.lightning_module
        assert module is not None
        if self.layout.world_size == 1:
            with self._context(name)():
                return getattr(module, name)(*args)
        logs = LogCapture(1)
        with self._context(name)(), logs.microbatch(module, 0):
            output = getattr(module, name)(*args)
        logged = [(entry, entry.values[0]) for entry in logs.entries()]
        if name != "training_step":
            log_for_replica(module, logged, self.mesh)
            return output
        skipped = module.automatic_optimization and output is None
        finish = begin_logs(module, logged, self.mesh, skipped=skipped)
        if module.automatic_optimization and not skipped and not self._trainer.fit_loop._skip_backward:
            self._finish_logs = finish  # after the backward, which hides the reduction
        else:
            finish()()
        if skipped and self._backward_syncs and self._trainer.accumulate_grad_batches > 1:
            self._reducers[None].reduce()  # gradients of earlier batches, which no backward averages now
        return output

    def _context(self, name: str) -> Callable[[], AbstractContextManager[Any]]:
        short = {"training_step": "train", "validation_step": "val"}.get(name, name.removesuffix("_step"))
        precision: Callable[[], AbstractContextManager[Any]] = getattr(self.precision_plugin, f"{short}_step_context")
        again = self._recomputing if name == "training_step" else None

        @contextlib.contextmanager
        def context() -> Iterator[None]:
            before, self._in_step = self._in_step, True
            try:
                module = self.lightning_module
                assert module is not None
                loggers = contextlib.nullcontext() if self._runner is None else noted_loggers(module)
                recomputed = contextlib.nullcontext() if again is None else again()
                with self._advised(), self.user_world(), precision(), loggers, recomputed, self._among_others(name):
                    yield
            except Exception as error:
                batch = self._trainer.fit_loop.epoch_loop.batch_idx
                if name == "training_step":
                    when = (
                        f"of batch {batch} (step {self._trainer.global_step})" if batch >= 0 else "when it was recorded"
                    )
                    note(error, f"in training_step {when}")
                raise
            finally:
                self._in_step = before

        return context

    @contextlib.contextmanager
    def _advised(self) -> Iterator[None]:
        """Errors about steps name what is to be set in this layout."""
        try:
            yield
        except (StepError, ControlFlowError) as error:
            advise(error, self.layout, self.options)
            raise

    def _among_others(self, name: str) -> AbstractContextManager[None]:
        """In a batch of an evaluation that other replicas do not have, asking them is an error: they never answer."""
        evaluates = name in ("validation_step", "test_step") and self.layout.data_parallel_size > 1
        return asked_in_common_batches(self._trainer, self.mesh, name) if evaluates else nullcontext()

    def _evaluate(self, name: str, args: Sequence[Any]) -> Any:
        module = self.lightning_module
        assert module is not None
        if self._runner is None or self._plan is None or not self._plan.is_cut:
            return self._plain_step(name, args)
        return self._run(name, args, None).output

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a forward-only schedule."""
        return self._evaluate("validation_step", [*args, *kwargs.values()])

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a forward-only schedule."""
        return self._evaluate("test_step", [*args, *kwargs.values()])

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a forward-only schedule; the predictions reach every rank of the pipeline."""
        return self._evaluate("predict_step", [*args, *kwargs.values()])

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """As Lightning's own, but averaged over replicas before a hook of the user sees the gradients, as in DDP."""
        module, plugin = self.lightning_module, self.precision_plugin
        assert module is not None
        self.pre_backward(closure_loss)
        backward: AbstractContextManager[Any] = nullcontext()
        if isinstance(self._runner, PlainRunner) and self._steps_by_hand:
            backward = self._runner.guards.off()
        closure_loss = plugin.pre_backward(closure_loss, module)
        with self._synced_norms(), backward:  # layers that are computed again ask once more
            plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
        self.post_backward(closure_loss)
        return plugin.post_backward(closure_loss, module)

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Where the step itself has run no backward, arm the reducers: this one completes the gradients."""
        if (self._runner is None or self._steps_by_hand) and self._backward_syncs:
            for reducer in self._reducers.values():
                reducer.arm()

    def post_backward(self, closure_loss: Tensor) -> None:
        """There, wait for the reduction; first for the logs, which tell if another replica takes no part."""
        self._until_backward.close()
        log, self._finish_logs = None if self._finish_logs is None else self._finish_logs(), None
        if (self._runner is None or self._steps_by_hand) and self._backward_syncs:
            for reducer in self._reducers.values():
                reducer.finish()
            if self._experts is not None:
                self._experts.agree_on_gradients()
        if log is not None:  # replicas may ask each other once more, now that all have come to the same place
            assert self.lightning_module is not None
            with current_hook(self.lightning_module, "training_step"):
                log()

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate: gradients stay local inside."""
        self._backward_syncs = False
        try:
            yield
        finally:
            self._backward_syncs = True
