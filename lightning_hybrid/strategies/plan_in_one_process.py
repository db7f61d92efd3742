"""The plan of a run, made in one process that stands for the first of any number of ranks; nothing is trained.

The process groups are torch's fake ones, in which a collective leaves this rank's values as they are. All decisions of
a start are made by the first rank, or from what every rank finds equally, so that they are those of the real ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_hybrid.graph.partition import Assignment
from lightning_hybrid.memory.estimate_rank_memory import RankMemory, activation_bytes
from lightning_hybrid.patching import replaced
from lightning_hybrid.step.deferred_init.parameters_on_meta import parameters_on_meta
from lightning_hybrid.step.standins.absent_tensors import drop
from lightning_hybrid.strategies.description.estimate_unrecorded_activations import record_in_one_stage
from lightning_hybrid.strategies.description.stage_memory import (
    memory_of_ranks,
    memory_of_stages,
    without_techniques,
)
from lightning_hybrid.strategies.description.start_table import describe_run, describe_techniques
from lightning_hybrid.strategies.execution.lifecycle import RunLifecycle
from lightning_hybrid.strategies.hybrid3d import Hybrid3DStrategy
from lightning_hybrid.strategies.logs.phases import phase, phases_reported_to
from lightning_hybrid.strategies.run.build import decide_without_runner
from lightning_hybrid.strategies.run.full_or_sharded_module_state import FullOrShardedState
from lightning_hybrid.strategies.run.partition import ModulePartition
from lightning_hybrid.strategies.run.run import Run
from lightning_hybrid.strategies.world.ranked_strategy import RankedStrategy
from lightning_hybrid.tensor.plan.unit_plan import UnitPlan
from lightning_hybrid.tensor.search.unit_search import plan_unit
from lightning_hybrid.verify.records.record import describe_failure


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

    def local_rank(self) -> int:
        """The first rank of its node."""
        return 0

    def node_rank(self) -> int:
        """The first node."""
        return 0


class _PlanIsMade(Exception):
    """Ends the fit: there is a plan."""


class PlanningStrategy(Hybrid3DStrategy):
    """Decides in ``setup`` what a rank would hold, and ends the fit before anything is sharded.

    Attributes:
        partition: The decisions.
        table: The table that a run prints at its start, without the environment.
        techniques: Its lines on ZeRO, offload, recomputation and compiled layers.
        failures: Why the step could not be recorded in one stage, of each attempt that failed.
        memory: Estimated, of each pipeline rank.
        memory_without_techniques: The same without ZeRO and recomputation.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.partition: ModulePartition | None = None
        self.table, self.techniques = "", list[str]()
        self.failures = list[Exception]()
        self.memory, self.memory_without_techniques = list[RankMemory](), list[RankMemory]()

    _may_plan = False  # the sizes that are set are those to describe

    def setup_environment(self) -> None:
        """Build the mesh; there is no other rank to watch."""
        RankedStrategy.setup_environment(self)
        module = self.lightning_module
        assert module is not None
        self._state = FullOrShardedState(module, self.world)
        self._files.connect(module, self.world, self._state)

    def setup(self, trainer: pl.Trainer) -> None:
        """Record and partition the step, as a run does; always raises, since the plan is all that is needed."""
        module, state = self.lightning_module, self._state
        assert self.accelerator is not None and self.model is not None and module is not None and state is not None
        self.accelerator.setup(trainer)
        lifecycle = RunLifecycle(
            trainer, module, self, state=state, files=self._files, recompute=self._recompute, evaluated=self._evaluated
        )
        self._lifecycle = lifecycle
        self._begin(lifecycle)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        _drop_meta_parameters(module, self.root_device)
        run = lifecycle.run
        if lifecycle.setting.needs_runner:
            may_retry, find = lifecycle.changes.may_retry, self._find_tensor_plan
            self.partition = ModulePartition(run, may_retry=may_retry, find_tensor_plan=find)
            run = self.partition.decide(None, "")
        else:
            run = decide_without_runner(run)
        recorded = None
        if not run.is_pipelined and lifecycle.setting.is_fitting:
            with phase("recording the step for its activations"):
                recorded = self._record(run)
        self.setup_optimizers(trainer)
        with phase("estimating memory"):
            self._describe(run, recorded)
        raise _PlanIsMade

    def _begin(self, lifecycle: RunLifecycle) -> None:
        """Change what a run would have, before its first step is recorded."""

    def _record(self, run: Run) -> Assignment | None:
        """Record the step of a run without stages; None if it cannot be recorded."""
        return record_in_one_stage(run, run.randomness, failures=self.failures)

    _find_tensor_plan: Callable[..., UnitPlan] = staticmethod(plan_unit)

    def _describe(self, run: Run, recorded: Assignment | None) -> None:
        self.table = str(describe_run(run, self.partition, self.optimizers))
        self.techniques = describe_techniques(run)
        self.memory = self._memory_of(run, recorded)
        self.memory_without_techniques = self._memory_of(without_techniques(run), recorded)

    def refusal(self) -> str | None:
        """Return why the ranks would hold shards of all parameters instead; None if they would not.

        An error of the user's step while it was recorded is printed with its traceback.
        """
        partition = self.partition
        if partition is None or partition.run.fallback is None:
            return None
        error = partition.fallback_error
        if error is not None and not describe_failure(error, steps_done=0).refused:
            traceback.print_exception(error)
        return partition.run.fallback.refusal

    @property
    def why_no_stages(self) -> str:
        """Why ranks would hold shards of all parameters instead of stages; "" if they would not, or on another error.

        A step that fails may need what hooks of a run set before its first batch.
        """
        partition = self.partition
        if partition is None or partition.run.fallback is None:
            return ""
        error = partition.fallback_error
        is_refused = error is None or describe_failure(error, steps_done=0).refused
        return partition.run.fallback.reason if is_refused else ""

    def _memory_of(self, run: Run, recorded: Assignment | None) -> list[RankMemory]:
        """Estimate the memory of each pipeline rank; ``recorded`` is the step of a run without stages."""
        batch = None if self.partition is None else self.partition.run.batch
        stages = memory_of_stages(run, self.optimizers, 1 if batch is None else batch.num_microbatches)
        if recorded is not None:
            stages = [dataclasses.replace(stages[0], activations=activation_bytes(recorded, run.policies)[0])]
        return memory_of_ranks(stages, run)

    def on_exception(self, exception: BaseException) -> None:
        """Do nothing: there is no other rank to tell."""

    def teardown(self) -> None:
        """Restore the user's objects; the process groups are the caller's."""
        if self.partition is not None:
            self.partition.run.until_end.close()
        if self._world is not None:
            self._world.close()


class MetaPlanningStrategy(PlanningStrategy):
    """Plans a run of a module without storage for its parameters."""

    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Build the layers of ``configure_model`` without storage."""
        with super().tensor_init_context(empty_init=False), parameters_on_meta():
            yield


Planning = TypeVar("Planning", bound=PlanningStrategy)


def make_plan(
    lightning: ModuleType,
    module: Any,
    fit_arguments: Mapping[str, Any],
    devices: int,
    options: Mapping[str, Any],
    precision: str,
    on_phase: Callable[[str], None] | None = None,
    *,
    num_nodes: int = 1,
    strategy_class: type[Planning] = PlanningStrategy,  # type: ignore[assignment]
) -> Planning:
    """Plan a run on ``devices`` ranks in this process, which must have no process groups; an error of it is raised.

    Args:
        lightning: The namespace of the module.
        module: The user's module; not to be used afterwards.
        fit_arguments: Arguments of ``Trainer.fit``.
        devices: The number of ranks.
        options: Arguments of the strategy.
        precision: Lightning's name of the precision.
        on_phase: Receives the name of each phase as it begins.
        num_nodes: The number of nodes, which divides the number of ranks.
        strategy_class: The class of the strategy.
    """
    _leave_out_averages(lightning, module)
    with _quiet(lightning), fake_ranks(devices), _data_prepared_alone(lightning), phases_reported_to(on_phase):
        strategy = strategy_class(**{**options, "process_group_backend": "fake"})
        off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=devices // num_nodes,
            num_nodes=num_nodes,
            strategy=strategy,
            plugins=[FirstOfManyRanks(devices)],
            precision=precision,
            max_epochs=1,
            **off,
        )
        with contextlib.suppress(_PlanIsMade):
            trainer.fit(module, **fit_arguments)
    return strategy


def _leave_out_averages(lightning: ModuleType, module: Any) -> None:
    """Make no averages of weights, which may have no storage to copy."""
    configure = module.configure_callbacks

    def without_averages() -> list[Any]:
        callbacks = configure()
        every = callbacks if isinstance(callbacks, Sequence) else [callbacks]
        return [each for each in every if not isinstance(each, lightning.callbacks.WeightAveraging)]

    module.configure_callbacks = without_averages


def _drop_meta_parameters(module: pl.LightningModule, device: torch.device) -> None:
    """Make parameters on the meta device absent ones, which recordings and estimates take as they take full ones."""
    for parameter in module.parameters():
        if parameter.is_meta:
            drop(parameter, device)


@contextlib.contextmanager
def fake_ranks(number: int, rank: int = 0) -> Iterator[None]:
    """Make this process one of a number of ranks of torch's fake process groups inside; the others are not there."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=number)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _data_prepared_alone(lightning: ModuleType) -> contextlib.AbstractContextManager[Any]:
    """Leave out the barrier around ``prepare_data``, for which Lightning connects to ranks that are not there."""
    connector = importlib.import_module(f"{lightning.__name__}.trainer.connectors.data_connector")
    return replaced(connector, "_InfiniteBarrier", contextlib.nullcontext, reason="there are no other ranks")


@contextlib.contextmanager
def _quiet(lightning: ModuleType) -> Iterator[None]:
    """Leave out what Lightning says about a run that will not take place."""
    logger = lightning.utilities.rank_zero.rank_zero_module.log
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)
