"""The ``hybrid3d`` strategy: Lightning's hooks, translated to the floors below."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import LBFGS

from lightning_hybrid.callbacks.adascale import AdaScale
from lightning_hybrid.pipeline.deposit import Deposit
from lightning_hybrid.pipeline.logs import LogCapture
from lightning_hybrid.pipeline.metrics import MetricSync
from lightning_hybrid.pipeline.plan import StagePlan
from lightning_hybrid.pipeline.runner import StepResult, StepRunner, TrainContext
from lightning_hybrid.pipeline.shared import SharedParameters
from lightning_hybrid.pipeline.transport import GroupTransport
from lightning_hybrid.precision import HybridPrecision
from lightning_hybrid.replicate.reducer import GradientReducer
from lightning_hybrid.schedule import Span
from lightning_hybrid.step.absent import is_absent
from lightning_hybrid.step.microbatch import BatchSplitter
from lightning_hybrid.step.randomness import KeyedRandomness
from lightning_hybrid.strategies.agreement import agree_on_start, whole_again_callback
from lightning_hybrid.strategies.first_step import record_first_step
from lightning_hybrid.strategies.gradients import connect_gradients
from lightning_hybrid.strategies.options import check_options
from lightning_hybrid.strategies.saved_state import StagedStrategy
from lightning_hybrid.strategies.start_table import describe
from lightning_hybrid.strategies.step_logs import ask_for_no_sync, begin_logs, log_for_all
from lightning_hybrid.strategies.user_code import current_hook, old_gradients_are_read, output_is_read
from lightning_hybrid.strategies.weights import MicrobatchWeight, weigh_by_count


class Hybrid3DStrategy(StagedStrategy):
    """Trains an unmodified LightningModule over data-parallel replicas and pipeline stages.

    The user's ``training_step`` is recorded once without parameters, cut into stages of equal cost, and run on each
    rank with only its stage's arithmetic; losses, gradients and parameters are those of one process.

    Args:
        data_parallel_size: Replicas that see different batches; "auto" takes all ranks that are left.
        tensor_parallel_size: Ranks that share each layer; only 1 so far.
        pipeline_parallel_size: Ranks that share the layers.
        num_microbatches: Parts that each replica's batch is split into; "auto" is 1 without stages and at most
            four times the number of stages with them.
        schedule: "gpipe", "1f1b" or "interleaved_1f1b".
        stages_per_rank: Stages that each pipeline rank holds; more than one makes 1F1B interleaved.
        pipeline_cuts: FQNs of the first unit of each stage but the first; balanced by cost if None.
        batch_splitter: ``function(batch, count) -> list of microbatches`` for batches that are no trees of tensors.
        microbatch_weight: ``function(microbatch) -> count`` by which microbatches (and replicas) are weighted, such as
            the number of unmasked tokens; their numbers of samples if None.
        example_batch: A batch to record the step with, where drawing one from the loader before the run is unsafe.
        process_group_backend: "nccl" or "gloo"; by device if None.
        timeout: Of collective operations.
        start_method: "popen" runs the script once per device; "fork" serves notebooks.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: As in Lightning's own.

    Raises:
        LayoutError: Sizes that do not multiply to the world size.
        ValueError: An unknown schedule, or an option that needs what is not there.
    """

    strategy_name = "hybrid3d"

    def __init__(
        self,
        data_parallel_size: int | Literal["auto"] = "auto",
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        num_microbatches: int | Literal["auto"] = "auto",
        schedule: str = "1f1b",
        stages_per_rank: int = 1,
        pipeline_cuts: Sequence[str] | None = None,
        batch_splitter: BatchSplitter | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(minutes=30),
        *,
        microbatch_weight: MicrobatchWeight | None = None,
        example_batch: Any = None,
        start_method: Literal["popen", "fork"] = "popen",
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        sizes: dict[str, int | Literal["auto"]] = {
            "data_parallel_size": data_parallel_size,
            "tensor_parallel_size": tensor_parallel_size,
            "pipeline_parallel_size": pipeline_parallel_size,
        }
        check_options(
            sizes,
            schedule=schedule,
            num_microbatches=num_microbatches,
            stages_per_rank=stages_per_rank,
            pipeline_cuts=pipeline_cuts,
            batch_splitter=batch_splitter,
            microbatch_weight=microbatch_weight,
        )
        super().__init__(
            sizes=sizes,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._num_microbatches = None if num_microbatches == "auto" else num_microbatches
        self._schedule = schedule
        self._stages_per_rank = stages_per_rank
        self._cuts = pipeline_cuts
        self._splitter = batch_splitter
        self._weight = microbatch_weight
        self._example_batch = example_batch
        self._runner: StepRunner | None = None
        self._shared: SharedParameters | None = None
        self._reducers: dict[int | None, GradientReducer] = {}
        self._backward_syncs = True
        self._evaluated = 0
        self._finish_logs: Callable[[], None] | None = None
        self._whole_again: pl.Callback | None = None
        self._metrics: MetricSync | None = None
        self.spans: list[Span] = []

    # -- set-up -------------------------------------------------------------------------------------------------------

    @property
    def precision_plugin(self) -> HybridPrecision:
        """The precision, ours: the connector's stock plugin is converted."""
        plugin = self._precision_plugin or Precision()
        if not isinstance(plugin, HybridPrecision):
            plugin = self._precision_plugin = HybridPrecision.of(plugin)
        return plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = plugin if plugin is None else HybridPrecision.of(plugin)

    def setup(self, trainer: pl.Trainer) -> None:
        """Place the model: agree on the start, record and cut, drop what lives elsewhere, build optimizers."""
        assert self.accelerator is not None and self.model is not None
        self.accelerator.setup(trainer)
        module = self.lightning_module
        assert module is not None
        ask_for_no_sync()
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        self._check(module, is_fitting)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        # Weights and generators must agree before anything is drawn or recorded.
        seed = agree_on_start(module, self.mesh, self.data_rank, self.root_device)
        self._seed = seed if self._seed is None else self._seed
        self._plan = self._runner = None
        if self._needs_runner():
            self._record(trainer, module, KeyedRandomness(self._seed, self.root_device))
        self._announce()
        if is_fitting:
            # Optimizers come after absent parameters are in place: they hold the user's own Parameter objects.
            self.setup_optimizers(trainer)
            self._connect_gradients(module)
        self.setup_precision_plugin()
        if is_fitting:
            _optimizers_to_device(self.optimizers, self.root_device)

    def _needs_runner(self) -> bool:
        num_stages = self.layout.pipeline_parallel_size * self._stages_per_rank
        return num_stages > 1 or (self._num_microbatches or 1) > 1 or self._weight is not None

    def _check(self, module: pl.LightningModule, is_fitting: bool) -> None:
        if is_fitting and self._needs_runner() and not module.automatic_optimization:
            raise ValueError(
                f"{type(module).__name__} uses manual optimization, which cannot be split into stages or microbatches"
                f" (pipeline_parallel_size={self.layout.pipeline_parallel_size}, num_microbatches="
                f"{self._num_microbatches or 'auto'}); set pipeline_parallel_size=1 and num_microbatches=1"
            )

    def _record(self, trainer: pl.Trainer, module: pl.LightningModule, randomness: KeyedRandomness) -> None:
        """Record the run's first step on an example batch and keep only this rank's part of the module."""
        pipeline = self.mesh.group("pp")
        self._plan = StagePlan(
            module,
            pipeline,
            randomness,
            stages_per_rank=self._stages_per_rank,
            cuts=self._cuts,
            agree=self.broadcast,
        )
        self._metrics = MetricSync(module, pipeline, self.mesh.group("data"))
        self._runner = StepRunner(
            module,
            self._plan,
            GroupTransport(pipeline, self.root_device),
            pipeline,
            randomness,
            schedule=self._schedule,
            num_microbatches=self._num_microbatches,
            splitter=self._splitter,
            replica=self.data_rank,
            metrics=self._metrics,
        )
        recorded = record_first_step(
            trainer,
            module,
            self._runner,
            example=self._example_batch,
            num_microbatches=self._num_microbatches,
            splitter=self._splitter,
            context=self._context,
        )
        if recorded and self._plan.num_ranks > 1:
            self._plan.drop_foreign()
            self._in_parts(module)
            if trainer.state.fn == TrainerFn.FITTING:
                self._whole_again = whole_again_callback(self)
                trainer.callbacks.insert(0, self._whole_again)  # type: ignore[attr-defined]

    def _announce(self) -> None:
        first = self._plan.first.assignment if self._plan is not None and self._plan.first is not None else None
        rank_zero_info(describe(self.layout, first, self._schedule, self.layout.pipeline_parallel_size))

    def _connect_gradients(self, module: pl.LightningModule) -> None:
        for reducer in self._reducers.values():
            reducer.close()
        if self._plan is not None and any(isinstance(optimizer, LBFGS) for optimizer in self.optimizers):
            raise ValueError(
                "LBFGS needs all parameters in one vector, but each pipeline rank holds its own;"
                " set pipeline_parallel_size=1"
            )
        self._reducers, self._shared, counted = connect_gradients(module, self._plan, self.mesh)
        self.precision_plugin.connect_mesh(self.mesh, lambda: counted)
        for callback in module.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, AdaScale):
                callback.connect_mesh(self.mesh, lambda: counted)
                for reducer in self._reducers.values():
                    reducer.observer = callback

    def model_to_device(self) -> None:
        """Move the module to this rank's device."""
        assert self.lightning_module is not None
        self.lightning_module.to(self.root_device)

    # -- steps --------------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the whole schedule, forward and backward; the backward that Lightning calls later hands over."""
        module = self.lightning_module
        assert module is not None
        if self._runner is None:
            return self._plain_step("training_step", args)
        batch_idx = self._trainer.fit_loop.epoch_loop.batch_idx
        accumulated = self._trainer.accumulate_grad_batches
        seed_factor = self.precision_plugin.loss_scale / accumulated
        trained = [p for p in module.parameters() if not is_absent(p)]
        shown = old_gradients_are_read(self._trainer)
        deposit = Deposit(trained, zeroed_later=batch_idx % accumulated == 0, seeded=seed_factor, shown=shown)
        weigh = None if self._weight is None else partial(weigh_by_count, count=self._weight, mesh=self.mesh)
        train = TrainContext(seed_factor, self._before_last_backward, self._reduce_stage, weigh)
        result = self._run("training_step", args, train)
        if self._backward_syncs:
            if self._shared is not None:
                self._shared.sum_gradients()
            self._reducers[None].reduce()
        assert result.loss is not None
        loss = deposit.wrap(result.loss)
        if isinstance(result.output, Mapping):
            return {**result.output, "loss": loss}
        return loss

    @property
    def _trainer(self) -> pl.Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    def _before_last_backward(self, stage: int) -> None:
        if self._backward_syncs and stage in self._reducers:
            self._reducers[stage].arm()

    def _reduce_stage(self, stage: int) -> None:
        if self._backward_syncs and stage in self._reducers:
            self._reducers[stage].finish()

    def _run(self, name: str, args: Sequence[Any], train: TrainContext | None) -> StepResult:
        module, runner = self.lightning_module, self._runner
        assert module is not None and runner is not None
        self._evaluated += train is None
        # Training batches are numbered over the whole run, also a resumed one: their numbers key what they draw.
        number = self._trainer.fit_loop.epoch_loop.total_batch_idx if train is not None else -1 - self._evaluated
        share = name == "predict_step" or output_is_read(self._trainer, name)
        result = runner.run(
            name,
            getattr(module, name),
            args,
            step_number=number,
            context=self._context(name),
            train=train,
            share_output=share,
        )
        self.spans = result.spans
        log_for_all(module, result.logs, self.mesh)
        return result

    def _plain_step(self, name: str, args: Sequence[Any]) -> Any:
        """The user's step as it is; only what it logs is caught, to be the same on every replica."""
        module = self.lightning_module
        assert module is not None
        if self.layout.data_parallel_size == 1:
            with self._context(name)():
                return getattr(module, name)(*args)
        logs = LogCapture(1)
        with self._context(name)(), logs.microbatch(module, 0):
            output = getattr(module, name)(*args)
        finish = begin_logs(module, [(entry, entry.values[0]) for entry in logs.entries()], self.mesh)
        if name == "training_step" and module.automatic_optimization and output is not None:
            self._finish_logs = finish  # after the backward, which hides the reduction
        else:
            finish()
        return output

    def _context(self, name: str) -> Callable[[], AbstractContextManager[Any]]:
        short = {"training_step": "train", "validation_step": "val"}.get(name, name.removesuffix("_step"))
        context: Callable[[], AbstractContextManager[Any]] = getattr(self.precision_plugin, f"{short}_step_context")
        return context

    def _evaluate(self, name: str, args: Sequence[Any]) -> Any:
        module = self.lightning_module
        assert module is not None
        if self._runner is None or self._plan is None or self._plan.first is None:
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

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Without stages, arm the reducer: this backward completes the gradients."""
        if self._runner is None and self._backward_syncs and self._reducers:
            self._reducers[None].arm()

    def post_backward(self, closure_loss: Tensor) -> None:
        """Without stages, wait for the reduction."""
        if self._runner is None and self._backward_syncs and self._reducers:
            self._reducers[None].finish()
        if self._finish_logs is not None:
            assert self.lightning_module is not None
            with current_hook(self.lightning_module, "training_step"):
                self._finish_logs()
            self._finish_logs = None

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate: gradients stay local inside."""
        self._backward_syncs = False
        try:
            yield
        finally:
            self._backward_syncs = True

    # -- the end ------------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Leave a whole module behind on every rank."""
        self.make_whole()
        if self._whole_again is not None:
            self._trainer.callbacks.remove(self._whole_again)  # type: ignore[attr-defined]
            self._whole_again = None
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
        for reducer in self._reducers.values():
            reducer.close()
        self._reducers = {}
        if not self._failed:
            super().teardown()
