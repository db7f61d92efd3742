"""`RunPlan`: what the ranks of a run would hold, decided in one process that stands for the first of them.

The process groups are torch's fake ones, in which a collective leaves this rank's values as they are. All decisions of
a start are made by the first rank, or from what every rank finds equally, so that real ranks would decide the same.
No Trainer runs: of a fit, only the hooks before `Strategy.setup` are called.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from torch.optim import Optimizer

from lightning_hybrid.batch.split import (
    batch_size_of,
    check_count,
    choose_count,
    elements_per_sample,
    split,
)
from lightning_hybrid.graph.partition import Assignment
from lightning_hybrid.patching import replace
from lightning_hybrid.predict.ranks import RankMemory
from lightning_hybrid.run.build import decide_without_runner
from lightning_hybrid.run.description.memory import memory_of_ranks, memory_of_stages, without_techniques
from lightning_hybrid.run.description.recording import record_in_one_stage
from lightning_hybrid.run.description.table import describe_run, describe_techniques
from lightning_hybrid.run.execution.lifecycle import RunLifecycle
from lightning_hybrid.run.partition import ModulePartition
from lightning_hybrid.run.run import RecordedBatch, Run
from lightning_hybrid.step.deferred_init.parameters import parameters_on_meta
from lightning_hybrid.step.standins.tensors import drop
from lightning_hybrid.strategies.hybrid3d import Hybrid3DStrategy
from lightning_hybrid.strategies.logs.phases import phase, phases_reported_to
from lightning_hybrid.strategies.start.example_batch import example_of_fit
from lightning_hybrid.strategies.world.ranked_strategy import RankedStrategy
from lightning_hybrid.tensor.search.unit import plan_unit
from lightning_hybrid.verify.record import describe_failure

_UNKNOWN = RecordedBatch(None, 1)


@dataclass(frozen=True)
class RunPlan:
    """What a run would do, decided before anything is sharded."""

    run: Run  # as the first rank has it; its process groups are gone
    partition: ModulePartition | None  # the decisions on it; None where no runner is needed
    optimizers: Sequence[Optimizer]  # of the Trainer
    recorded: Assignment | None = None  # the recorded step of a run without stages
    failures: Sequence[Exception] = ()  # why that step could not be recorded, of each attempt that failed
    batch: RecordedBatch = field(default=_UNKNOWN)  # the batch of a replica, and its microbatches
    sample_elements: float = 0.0  # elements of the tensors of one of its samples; 0 if unknown
    table: str = ""  # the table that a run prints at its start, without the environment
    techniques: Sequence[str] = ()  # its lines on ZeRO, offload, recomputation and compiled layers
    memory: Sequence[RankMemory] = ()  # estimated, of each pipeline rank
    memory_without_techniques: Sequence[RankMemory] = ()  # the same without ZeRO and recomputation

    def __str__(self) -> str:
        """The start table."""
        return self.table

    @property
    def refusal(self) -> str | None:
        """Why the ranks would hold shards of all parameters instead; None if they would not."""
        return None if self.run.fallback is None else self.run.fallback.refusal

    @property
    def why_no_stages(self) -> str:
        """Why ranks would hold shards of all parameters instead of stages; "" if they would not, or on another error.

        A step that fails may need what hooks of a run set before its first batch.
        """
        return "" if self.run.fallback is None or self._error_of_step is not None else self.run.fallback.reason

    @property
    def _error_of_step(self) -> Exception | None:
        """The error of the user's step while it was recorded; None where it is a refusal, or there is none."""
        error = None if self.partition is None else self.partition.fallback_error
        return None if error is None or describe_failure(error, steps_done=0).refused else error

    def print_error(self) -> None:
        """Print the traceback of an error of the user's step while it was recorded, if there was one."""
        if self.run.fallback is not None and self._error_of_step is not None:
            traceback.print_exception(self._error_of_step)


Recording = Callable[[Run, list[Exception]], Assignment | None]


def _record(run: Run, failures: list[Exception]) -> Assignment | None:
    return record_in_one_stage(run, run.randomness, failures=failures)


@dataclass(frozen=True)
class PlanRequest:
    """How a run is planned."""

    num_nodes: int = 1  # the number of nodes, which divides the number of ranks
    has_storage: bool = True  # whether parameters have storage; wide layers are searched on narrow copies alone if not
    first_microbatch: bool = False  # whether the first microbatch stands for all of them while the step is recorded
    describes: bool = True  # whether to describe the run: its table, and its memory
    # records the step of a run without stages, and adds the error of each attempt to a list
    record: Recording = field(default=_record)
    on_phase: Callable[[str], None] | None = None  # receives the name of each phase as it begins


def make_plan(
    lightning: ModuleType,
    module: Any,
    fit_arguments: Mapping[str, Any],
    devices: int,
    options: Mapping[str, Any],
    precision: str,
    request: PlanRequest | None = None,
) -> RunPlan:
    """Plan a run on ``devices`` ranks in this process; an error of it is raised.

    Args:
        lightning: The namespace of the module.
        module: The user's module; not to be used afterwards.
        fit_arguments: Arguments of ``Trainer.fit``.
        devices: The number of ranks.
        options: Arguments of the strategy.
        precision: Lightning's name of the precision.
        request: How it is planned, if not by default.
    """
    request = request or PlanRequest()
    with _quiet(lightning), fake_ranks(devices), phases_reported_to(request.on_phase):
        strategy = _FirstRank(request, **{**options, "process_group_backend": "fake"})
        off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=devices // request.num_nodes,
            num_nodes=request.num_nodes,
            strategy=strategy,
            plugins=[FirstOfManyRanks(devices)],
            precision=precision,
            max_epochs=1,
            **off,
        )
        with contextlib.closing(strategy):
            _begin_fit(lightning, trainer, module, fit_arguments)
            return _decide(strategy.begin(trainer), request)


def _begin_fit(lightning: ModuleType, trainer: Any, module: Any, arguments: Mapping[str, Any]) -> None:
    """Do what `Trainer.fit` does up to `Strategy.setup`, by Lightning's own functions; no rank is waited for."""
    names = ("states", "configuration_validator", "call")
    states, validator, call = (importlib.import_module(f"{lightning.__name__}.trainer.{name}") for name in names)
    trainer.strategy.connect(module)
    trainer.state.fn, trainer.state.status = states.TrainerFn.FITTING, states.TrainerStatus.RUNNING
    trainer.training = True
    trainer._data_connector.attach_data(module, **arguments)
    trainer._callback_connector._attach_model_callbacks()
    trainer._callback_connector._attach_model_logging_functions()
    averaging = lightning.callbacks.WeightAveraging  # which may find no storage to copy
    trainer.callbacks = [each for each in trainer.callbacks if not isinstance(each, averaging)]
    validator._verify_loop_configurations(trainer)
    trainer.strategy.setup_environment()
    if trainer.datamodule is not None:
        call._call_lightning_datamodule_hook(trainer, "prepare_data")
    call._call_lightning_module_hook(trainer, "prepare_data")
    call._call_setup_hook(trainer)
    call._call_configure_model(trainer)
    trainer._logger_connector.reset_results()
    trainer._logger_connector.reset_metrics()


def _decide(lifecycle: RunLifecycle, request: PlanRequest) -> RunPlan:
    """Record and partition the step, as a run does, and describe what follows from it."""
    batch = _narrowed(lifecycle) if request.first_microbatch else None
    run, setting, trainer = lifecycle.run, lifecycle.setting, lifecycle.setting.trainer
    partition, failures, recorded = None, list[Exception](), None
    try:
        if setting.needs_runner:
            find = partial(plan_unit, at_full_width=request.has_storage)
            partition = ModulePartition(run, may_retry=lifecycle.changes.may_retry, find_tensor_plan=find)
            run = partition.decide(None, "")
            if batch is not None and run.is_pipelined and run.batch is not None:
                run = partition.run = dataclasses.replace(run, batch=batch)
                if run.runner is not None:  # of the first microbatch so far
                    run.runner.batch_bytes["training_step"] *= batch.num_microbatches
        else:
            run = decide_without_runner(run)
        if request.describes and not run.is_pipelined and setting.is_fitting:
            with phase("recording the step for its activations"):
                recorded = request.record(run, failures)
        trainer.strategy.setup_optimizers(trainer)
        plan = RunPlan(run, partition, trainer.optimizers, recorded, failures)
        if not request.describes:
            return plan
        with phase("estimating memory"):
            return _described(plan, measures_batch=not request.has_storage)
    finally:
        run.until_end.close()


def _narrowed(lifecycle: RunLifecycle) -> RecordedBatch | None:
    """Let the first microbatch be the whole batch of a recording in stages: all microbatches have its shapes.

    Returns:
        The batch that the run would have; None where there are no stages.
    """
    setting, options = lifecycle.setting, lifecycle.setting.options
    if not (setting.layout.pipeline_parallel_size > 1 and setting.is_fitting):
        return None
    batch = example_of_fit(setting.trainer, options.example_batch)
    check_count(batch, options.microbatches)
    num_stages = setting.layout.pipeline_parallel_size * options.stages_of_each_rank
    count = choose_count(batch, options.microbatches, num_stages, options.batch_splitter)
    first = split(batch, count, options.batch_splitter)[0][0]
    options = dataclasses.replace(options, example_batch=first, num_microbatches=1, batch_splitter=None)
    lifecycle.use_options(options)
    return RecordedBatch(batch_size_of(batch), count)


def _described(plan: RunPlan, *, measures_batch: bool) -> RunPlan:
    run, elements = plan.run, 0.0
    batch = run.batch or _UNKNOWN
    if measures_batch and run.setting.is_fitting and not run.is_pipelined:
        example = example_of_fit(run.setting.trainer, run.setting.options.example_batch)
        elements = elements_per_sample(example) or 0.0
        batch = run.batch or RecordedBatch(batch_size_of(example), run.count(example))
    return dataclasses.replace(
        plan,
        batch=batch,
        sample_elements=elements,
        table=str(describe_run(run, plan.optimizers)),
        techniques=describe_techniques(run),
        memory=_memory_of(plan, run),
        memory_without_techniques=_memory_of(plan, without_techniques(run)),
    )


def _memory_of(plan: RunPlan, run: Run) -> list[RankMemory]:
    """Estimate the memory of each pipeline rank."""
    count = 1 if run.batch is None else run.batch.num_microbatches
    stages = memory_of_stages(run, plan.optimizers, count, plan.recorded)
    return memory_of_ranks(stages, run)


# -- the first of many ranks -------------------------------------------------------------------------------------------


class FirstOfManyRanks(LightningEnvironment):
    """A cluster environment in which this process is rank 0 of ``world_size``, and the others are not there."""

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self._number = world_size

    @property
    def creates_processes_externally(self) -> bool:
        """Lightning starts no processes."""
        return True

    def world_size(self) -> int:
        """The number of ranks."""
        return self._number

    def set_world_size(self, size: int) -> None:
        """Do nothing: the size is fixed."""

    def global_rank(self) -> int:
        """The first rank."""
        return 0

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: it is the first rank."""

    local_rank = node_rank = global_rank


class _FirstRank(Hybrid3DStrategy):
    """The strategy of a run that is only planned: there is no other rank to watch, and nothing is sharded."""

    _may_plan = False  # the sizes that are set are those to describe

    def __init__(self, request: PlanRequest, **options: Any) -> None:
        super().__init__(**options)
        self._has_storage = request.has_storage

    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Build the layers of ``configure_model``, without storage if the module has none."""
        inner = contextlib.nullcontext() if self._has_storage else parameters_on_meta()
        with super().tensor_init_context(empty_init if self._has_storage else False), inner:
            yield

    def setup_environment(self) -> None:
        """Build the mesh."""
        RankedStrategy.setup_environment(self)
        assert self.lightning_module is not None
        self.connect_state(self.lightning_module)

    def begin(self, trainer: pl.Trainer) -> RunLifecycle:
        """Return the run as it is before its step is recorded, without storage for parameters on the meta device."""
        module, state = self.lightning_module, self._state
        assert self.accelerator is not None and self.model is not None and module is not None and state is not None
        self.accelerator.setup(trainer)
        self._lifecycle = RunLifecycle(
            trainer, module, self, state=state, files=self._files, recompute=self._recompute, evaluated=self._evaluated
        )
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        for parameter in module.parameters():
            if parameter.is_meta:  # absent ones are taken by recordings and estimates as full ones
                drop(parameter, self.root_device)
        return self._lifecycle

    def close(self) -> None:
        """Leave the world; the process groups are the caller's."""
        if self._world is not None:
            self._world.close()


@contextlib.contextmanager
def fake_ranks(number: int, rank: int = 0) -> Iterator[None]:
    """Make this process one of a number of ranks of torch's fake process groups inside; the others are not there."""
    with _own_world():
        dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=number)
        try:
            yield
        finally:
            dist.destroy_process_group()


@contextlib.contextmanager
def _own_world() -> Iterator[None]:
    """Set the process groups of an earlier fit aside inside; what torch makes there is gone afterwards."""
    c10d, hook = dist.distributed_c10d, sys.excepthook  # which `init_process_group` wraps each time
    names = dict(c10d._world.pg_names)
    for name in names.values():  # torch finds groups by these in compiled code, and numbers those of a world from 0
        c10d._unregister_process_group(name)
    tables = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag")
    world = type("World", (c10d._World,), {**{table: {} for table in tables}, "group_count": 0})()
    undo = replace(c10d, "_world", world, reason="a run is planned beside the groups of a fit")
    try:
        yield
    finally:
        undo()
        sys.excepthook = hook
        for group, name in names.items():
            c10d._register_process_group(name, group)


@contextlib.contextmanager
def _quiet(lightning: ModuleType) -> Iterator[None]:
    """Leave out what Lightning says about a run that will not take place, and the warning of what is refused here."""
    logger = lightning.utilities.rank_zero.rank_zero_module.log
    level = logger.level
    logger.setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "sharded instead of")
        warnings.filterwarnings("ignore", module=rf"{lightning.__name__.partition('.')[0]}\.")
        try:
            yield
        finally:
            logger.setLevel(level)
