"""The ``hybrid3d`` strategy: Lightning's hooks, translated to the floors below."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.fabric.utilities.distributed import (
    _distributed_is_initialized,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.optimizer import _optimizer_to_device, _optimizers_to_device
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from lightning_hybrid.checkpoint.single_file import (
    gather_module_state,
    gather_optimizer_state,
    load_module_state,
    own_optimizer_state,
)
from lightning_hybrid.layout import LayoutError, ParallelLayout
from lightning_hybrid.mesh import Mesh
from lightning_hybrid.pipeline.deposit import Deposit
from lightning_hybrid.pipeline.plan import StagePlan
from lightning_hybrid.pipeline.runner import StepResult, StepRunner, TrainContext
from lightning_hybrid.pipeline.shared import SharedParameters
from lightning_hybrid.pipeline.transport import GroupTransport
from lightning_hybrid.precision import HybridPrecision
from lightning_hybrid.replicate.reducer import GradientReducer
from lightning_hybrid.schedule import SCHEDULE_NAMES, Span
from lightning_hybrid.step.absent import is_absent
from lightning_hybrid.step.microbatch import BatchSplitter, check_count
from lightning_hybrid.step.randomness import KeyedRandomness
from lightning_hybrid.strategies.agreement import agree_on_start, check_gathered, whole_again_callback
from lightning_hybrid.strategies.example_batch import take_example
from lightning_hybrid.strategies.start_table import describe

_MODES = {
    TrainerFn.FITTING: ("training_step", "max_size_cycle"),
    TrainerFn.VALIDATING: ("validation_step", "sequential"),
    TrainerFn.TESTING: ("test_step", "sequential"),
    TrainerFn.PREDICTING: ("predict_step", "sequential"),
}


class Hybrid3DStrategy(ParallelStrategy):
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
        example_batch: Any = None,
        start_method: Literal["popen", "fork"] = "popen",
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        if schedule not in SCHEDULE_NAMES:
            raise ValueError(f"schedule={schedule!r} is unknown; use one of {', '.join(SCHEDULE_NAMES)}")
        if num_microbatches != "auto" and (not isinstance(num_microbatches, int) or num_microbatches < 1):
            raise ValueError(f"num_microbatches={num_microbatches!r}; use 'auto' or a whole number of 1 or more")
        if not isinstance(stages_per_rank, int) or stages_per_rank < 1:
            raise ValueError(f"stages_per_rank={stages_per_rank!r}; use a whole number of 1 or more")
        if tensor_parallel_size != 1:
            raise LayoutError(f"tensor_parallel_size={tensor_parallel_size} is not there yet; set it to 1")
        self._sizes = {
            "data_parallel_size": data_parallel_size,
            "tensor_parallel_size": tensor_parallel_size,
            "pipeline_parallel_size": pipeline_parallel_size,
        }
        self._num_microbatches = None if num_microbatches == "auto" else num_microbatches
        self._schedule = schedule
        self._stages_per_rank = stages_per_rank
        self._cuts = pipeline_cuts
        self._splitter = batch_splitter
        self._example_batch = example_batch
        self._process_group_backend = process_group_backend
        self._timeout = timeout
        self._start_method = start_method
        self.num_nodes = 1
        self._layout: ParallelLayout | None = None
        self._mesh: Mesh | None = None
        self._plan: StagePlan | None = None
        self._runner: StepRunner | None = None
        self._shared: SharedParameters | None = None
        self._reducers: dict[int | None, GradientReducer] = {}
        self._backward_syncs = True
        self._is_whole = True
        self._failed = False
        self._batches_run = 0
        self._guards: list[Any] = []
        self._whole_again: pl.Callback | None = None
        self.spans: list[Span] = []

    # -- the world ----------------------------------------------------------------------------------------------------

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Ranks on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def process_group_backend(self) -> str | None:
        """The backend of ``torch.distributed``."""
        return self._process_group_backend

    @property
    def layout(self) -> ParallelLayout:
        """The sizes of this run."""
        if self._layout is None:
            raise RuntimeError("the layout is known once the processes run; ask in setup() or later")
        return self._layout

    @property
    def mesh(self) -> Mesh:
        """The process groups of this run."""
        if self._mesh is None:
            raise RuntimeError("the mesh is there once the processes run; ask in setup() or later")
        return self._mesh

    @property
    def plan(self) -> StagePlan | None:
        """Which stage holds what; None while no step was recorded."""
        return self._plan

    @property
    def is_distributed(self) -> bool:
        """Whether samplers must be split: with one replica the user's order of samples stands."""
        return self._layout is None or self._layout.data_parallel_size > 1

    @property
    def data_rank(self) -> int:
        """Index of this rank's replica."""
        return self.layout.data_rank(self.global_rank)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Samplers are split over the data axes only; all ranks of a replica draw the same batch."""
        return {"num_replicas": self.layout.data_parallel_size, "rank": self.data_rank}

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if self._start_method != "popen":
            self._launcher = _MultiProcessingLauncher(self, start_method=self._start_method)
        elif not self.cluster_environment.creates_processes_externally:
            self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        """Join the world and build the mesh."""
        super().setup_environment()
        reset_seed()
        assert self.cluster_environment is not None
        self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank
        self._layout = ParallelLayout.resolve(self.world_size, **self._sizes)  # type: ignore[arg-type]
        backend = self._process_group_backend or _get_default_process_group_backend_for_device(self.root_device)
        self._process_group_backend = backend
        device_id = self.root_device if self.root_device.type != "cpu" else None
        _init_dist_connection(self.cluster_environment, backend, timeout=self._timeout, device_id=device_id)
        if self._mesh is None or self._mesh.layout != self._layout:
            self._mesh = Mesh.build(self._layout, self.root_device.type)
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._mesh.published()

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
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        self._check(module, is_fitting)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        # Weights and generators must agree before anything is drawn or recorded.
        seed = agree_on_start(module, self.mesh, self.data_rank, self.root_device)
        self._plan = self._runner = None
        if self._needs_runner():
            self._record(trainer, module, KeyedRandomness(seed, self.root_device))
        self._announce()
        if is_fitting:
            # Optimizers come after absent parameters are in place: they hold the user's own Parameter objects.
            self.setup_optimizers(trainer)
            self._connect_gradients(module)
        self.setup_precision_plugin()
        if is_fitting:
            _optimizers_to_device(self.optimizers, self.root_device)

    def _needs_runner(self) -> bool:
        return self.layout.pipeline_parallel_size > 1 or self._stages_per_rank > 1 or (self._num_microbatches or 1) > 1

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
        )
        assert trainer.state.fn is not None
        name, mode = _MODES[TrainerFn(trainer.state.fn)]
        if not is_overridden(name, module):
            return
        loop = trainer._active_loop
        batch = self._example_batch if self._example_batch is not None else take_example(trainer, loop, mode)
        check_count(batch, self._num_microbatches)
        is_fitting = name == "training_step"
        was_training = {part: part.training for part in module.modules()}
        if not is_fitting:
            module.eval()
        try:
            with torch.set_grad_enabled(is_fitting), self._current_hook(module, name):
                self._runner.record(name, getattr(module, name), self._arguments(name, batch), self._context(name))
        finally:
            for part, mode_before in was_training.items():
                part.training = mode_before
        if self._plan.num_ranks > 1:
            self._plan.drop_foreign()
            self._is_whole = False
            self._guards.append(module.register_state_dict_post_hook(check_gathered))
            if is_fitting:
                self._whole_again = whole_again_callback(self)
                trainer.callbacks.insert(0, self._whole_again)

    def _arguments(self, name: str, batch: Any) -> tuple[Any, ...]:
        """The arguments with which Lightning calls a step, as far as the step takes them."""
        import inspect

        step = getattr(self.lightning_module, name)
        takes = inspect.signature(step).parameters
        anything = any(p.kind is p.VAR_POSITIONAL for p in takes.values())
        if "dataloader_iter" in takes:
            raise ValueError(f"{name}(dataloader_iter) fetches its own batches, which microbatches cannot share;"
                             " take the batch as an argument, or set pipeline_parallel_size=1")  # fmt: skip
        return (batch, 0) if anything or len(takes) > 1 else (batch,)

    def _announce(self) -> None:
        first = self._plan.first.assignment if self._plan is not None and self._plan.first is not None else None
        rank_zero_info(describe(self.layout, first, self._schedule, self.layout.pipeline_parallel_size))

    def _connect_gradients(self, module: pl.LightningModule) -> None:
        """Bucketed reducers per stage, the shared parameters, and the precision's view of the mesh."""
        for reducer in self._reducers.values():
            reducer.close()
        parameters = dict(module.named_parameters())
        counted = {id(parameter) for parameter in parameters.values()}
        data = self.mesh.group("data")
        self._shared = None
        if self._plan is None or self._plan.first is None:
            self._reducers = {None: GradientReducer(list(parameters.items()), data)}
        else:
            plan = self._plan
            holders = {name: plan.ranks_of(name) for name in parameters}
            counted = {id(parameters[name]) for name, ranks in holders.items() if ranks[0] == plan.rank}
            self._shared = SharedParameters(holders, parameters, self.mesh.group("pp"))
            assignment = plan.first.assignment
            own: dict[int | None, list[tuple[str, torch.nn.Parameter]]] = {None: []}
            for name, ranks in holders.items():
                if plan.rank in ranks:
                    stages = [s for s in assignment.holders.get(name, (plan.homes[name],)) if s in plan.stages]
                    # What several stages or ranks hold is complete only after all of them.
                    key = stages[0] if len(ranks) == 1 and len(stages) == 1 else None
                    own.setdefault(key, []).append((name, parameters[name]))
            self._reducers = {key: GradientReducer(members, data) for key, members in own.items()}
        if any(isinstance(optimizer, LBFGS) for optimizer in self.optimizers) and self._plan is not None:
            raise ValueError(
                "LBFGS needs all parameters in one vector, but each pipeline rank holds its own;"
                " set pipeline_parallel_size=1"
            )
        self.precision_plugin.connect_mesh(self.mesh, lambda: counted)

    def model_to_device(self) -> None:
        """Move the module to this rank's device."""
        assert self.lightning_module is not None
        self.lightning_module.to(self.root_device)

    def process_dataloader(self, dataloader: object) -> object:
        """Seed loader workers by replica, so that all ranks of a replica augment alike."""
        return dataloader

    # -- steps --------------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the whole schedule, forward and backward; the backward that Lightning calls later hands over."""
        module = self.lightning_module
        assert module is not None
        if self._runner is None:
            with self.precision_plugin.train_step_context():
                return module.training_step(*args, **kwargs)
        batch_idx = self._trainer.fit_loop.epoch_loop.batch_idx
        accumulated = self._trainer.accumulate_grad_batches
        seed_factor = self.precision_plugin.loss_scale / accumulated
        trained = [p for p in module.parameters() if not is_absent(p)]
        deposit = Deposit(trained, zeroed_later=batch_idx % accumulated == 0, seeded=seed_factor)
        train = TrainContext(seed_factor, self._before_last_backward, self._reduce_stage)
        self._batches_run += 1
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
        number = self._batches_run
        share = name == "predict_step" or self._output_is_read(name)
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
        for entry, value in result.logs:
            if entry.metric is not None:
                entry.metric._forward_cache = torch.tensor(value, device=self.root_device)
                module.log(entry.name, entry.metric, **entry.total_kwargs())
            else:
                module.log(entry.name, torch.tensor(value, device=self.root_device), **entry.total_kwargs())
        return result

    def _output_is_read(self, name: str) -> bool:
        """Whether any hook of the user sees what the step returned."""
        hooks = ["on_train_batch_end"] if name == "training_step" else [f"on_{name.removesuffix('_step')}_batch_end"]
        users = [self.lightning_module, *self._trainer.callbacks]  # type: ignore[attr-defined]
        return any(
            not getattr(type(user), hook, pl.Callback).__module__.startswith(("lightning.", "pytorch_lightning."))
            for user in users
            for hook in hooks
        )

    def _context(self, name: str) -> Callable[[], AbstractContextManager[Any]]:
        precision = self.precision_plugin
        contexts = {
            "training_step": precision.train_step_context,
            "validation_step": precision.val_step_context,
            "test_step": precision.test_step_context,
            "predict_step": precision.predict_step_context,
        }
        return contexts[name]

    @contextlib.contextmanager
    def _current_hook(self, module: pl.LightningModule, name: str) -> Iterator[None]:
        before, module._current_fx_name = module._current_fx_name, name
        try:
            yield
        finally:
            module._current_fx_name = before

    def _evaluate(self, name: str, args: Sequence[Any]) -> Any:
        module = self.lightning_module
        assert module is not None
        if self._runner is None or self._plan is None or self._plan.first is None:
            with self._context(name)():
                return getattr(module, name)(*args)
        self._batches_run += 1
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

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate: gradients stay local inside."""
        self._backward_syncs = False
        try:
            yield
        finally:
            self._backward_syncs = True

    # -- collectives that user code asks for --------------------------------------------------------------------------

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        if not _distributed_is_initialized():
            return
        if dist.get_backend() == "nccl":
            dist.barrier(device_ids=[self.root_device.index])
        else:
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The object of rank ``src`` on every rank."""
        if not _distributed_is_initialized():
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src)
        return box[0]

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the data axes: the ranks of one replica hold the same value and count once."""
        if not isinstance(tensor, Tensor):
            return tensor
        return _sync_ddp_if_available(tensor, group or self.mesh.group("data"), reduce_op=reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all (or any) ranks of the world decided so."""
        votes = torch.tensor(int(decision), device=self.root_device)
        self.mesh.all_reduce(votes, "world")
        return int(votes) == self.world_size if all else bool(votes)

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Gather over the data axes; a leading dimension of the data-parallel size is added."""
        return super().all_gather(tensor, group=group or self.mesh.group("data"), sync_grads=sync_grads)

    # -- saved state --------------------------------------------------------------------------------------------------

    def make_whole(self) -> None:
        """Give every rank the whole module again; collective."""
        if self._is_whole or self._plan is None or self._failed:
            return
        self._plan.make_whole()
        self._is_whole = True
        for guard in self._guards:
            guard.remove()
        self._guards.clear()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The state dict of the whole module on the first rank; collective."""
        assert self.lightning_module is not None
        if self._is_whole or self._plan is None:
            return self.lightning_module.state_dict()
        return gather_module_state(self.lightning_module, self._plan) if self.data_rank == 0 else {}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load a whole state dict into what this rank holds."""
        assert self.lightning_module is not None
        if self._is_whole:
            self.lightning_module.load_state_dict(checkpoint["state_dict"], strict=strict)
        else:
            load_module_state(self.lightning_module, checkpoint["state_dict"], strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state of an optimizer over all pipeline ranks, on the first; collective."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        if self._plan is None or self._plan.num_ranks == 1:
            return optimizer.state_dict()
        return gather_optimizer_state(optimizer, self._plan) if self.data_rank == 0 else {}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load each optimizer's state for the parameters of this rank."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            optimizer.load_state_dict(own_optimizer_state(optimizer, state))
            _optimizer_to_device(optimizer, self.root_device)

    # -- the end ------------------------------------------------------------------------------------------------------

    def on_exception(self, exception: BaseException) -> None:
        """Ranks that failed take no further part in collectives."""
        self._failed = True

    def teardown(self) -> None:
        """Leave a whole module behind on every rank."""
        self.make_whole()
        if self._whole_again is not None:
            self._trainer.callbacks.remove(self._whole_again)  # type: ignore[attr-defined]
            self._whole_again = None
        for reducer in self._reducers.values():
            reducer.close()
        self._reducers = {}
        if not self._failed:
            super().teardown()
