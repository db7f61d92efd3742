"""The partition of a module over ranks: stages if its step can be recorded, else shards; and sharded layers."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from lightning_hybrid.experts.parallel.sharded_experts import ShardedExperts
from lightning_hybrid.graph.partition import UnfitError
from lightning_hybrid.layout import LayoutError
from lightning_hybrid.memory.recompute_layers import Recomputation
from lightning_hybrid.mesh import Mesh
from lightning_hybrid.parts.local_shards import AxisSharding, LocalShards
from lightning_hybrid.pipeline.results.metric_sync import MetricSync
from lightning_hybrid.pipeline.runner import StepRunner
from lightning_hybrid.pipeline.runner_base import MicrobatchRunner
from lightning_hybrid.pipeline.stages.stage_plan import StagePlan
from lightning_hybrid.randomness.keyed_draws import KeyedRandomness
from lightning_hybrid.step.batch.microbatch import BatchError
from lightning_hybrid.strategies.run.run import Setting
from lightning_hybrid.strategies.run.zero3_fallback_reason import Demotion
from lightning_hybrid.strategies.start.first_recording import record_first_step, warn_of_mixing
from lightning_hybrid.strategies.start.plan_folder import plan_folder
from lightning_hybrid.strategies.start.runner_factory import make_runner
from lightning_hybrid.strategies.techniques.expert_parallel import ExpertPlanner
from lightning_hybrid.strategies.techniques.recomputation import recompute_layers, recompute_plain_layers
from lightning_hybrid.strategies.techniques.tensor_parallel import TensorPlanner, warn_across_nodes
from lightning_hybrid.strategies.techniques.zero import LayerReads, zero_shardings
from lightning_hybrid.strategies.user_code.hook_context import why_no_stages
from lightning_hybrid.tensor.runtime.sharded_model import ShardedModel


class ModulePartition:
    """Decides which stages and shards of the module each rank holds; records the first step for that.

    Attributes:
        mesh: The ranks that parameters are sharded over.
        demotion: Why ranks hold shards in place of stages, if they do.
        may_retry: Whether a training batch may still show that the step can be partitioned after all.
        plan: The stages and their parameters.
        runner: Of the steps.
        metrics: Synchronizes torchmetrics of the module.
        shards: How tensor and context ranks shard each layer, if they do.
        parts: The local shards of parameters, if they are sharded.
        experts: The experts sharded over ranks, if they are.
        expert_planner: Finds the experts, and runs modules with them.
        zero_shardings: How parameters are sharded over replicas.
        layer_reads: Which parameters of a layer code outside of it reads.
        recomputation: Of layers, if there is any.
        plan_summary, expert_summary: What the planners found, for the table at the start.
        has_step: Whether the module has a step of this kind that could be recorded.
    """

    plan: StagePlan
    runner: MicrobatchRunner
    metrics: MetricSync

    def __init__(self, setting: Setting, randomness: KeyedRandomness, *, may_retry: bool) -> None:
        self._setting, self._randomness = setting, randomness
        self.mesh: Mesh = setting.world.mesh
        self.may_retry = may_retry
        self.demotion: Demotion | None = None
        self.shards: ShardedModel | None = None
        self.parts: LocalShards | None = None
        self.experts: ShardedExperts | None = None
        self.zero_shardings: list[AxisSharding] = []
        self.layer_reads = LayerReads()
        self.recomputation: Recomputation | None = None
        self.expert_planner: ExpertPlanner | None = None
        self.plan_summary = self.expert_summary = ""
        self.has_step = True
        self._tensor_planner: TensorPlanner | None = None

    @property
    def is_pipelined(self) -> bool:
        """Whether steps run in several stages."""
        return self._setting.layout.pipeline_parallel_size > 1 and self.demotion is None

    def decide(self, arguments: Sequence[Any] | None, refusal: str) -> None:
        """Partition the module into stages if its step can be recorded, else into shards.

        Args:
            arguments: Of the training step that comes next, if the run has begun.
            refusal: Why the step cannot be partitioned, where that is known on all ranks.
        """
        setting, options = self._setting, self._setting.options
        self._plan_on_mesh()
        recorded, error, refusal = self._try_to_record(arguments, refusal)
        if setting.is_fitting and self.is_pipelined and (reason := refusal or setting.world.first_reason(error)):
            self._demote(["pp"], reason, error)
            recorded = self._record_step(arguments) if self._has_planners else ()
        runner = self.runner
        is_tried = setting.is_fitting and setting.checks_objective and options.batch_splitter is None
        if is_tried and isinstance(runner, StepRunner) and recorded:
            with setting.contexts.advice():
                warn_of_mixing(setting.trainer, setting.module, runner, recorded, self._context("training_step"))
        self.has_step = recorded is not None
        try:
            self._plan_layers(recorded=self.has_step)
        except LayoutError as error:  # on every rank
            if options.tensor_parallel_plan is not None or setting.layout.expert_parallel_size > 1:
                raise
            self.may_retry &= arguments is None  # what the start hooks set may let layers be recorded
            self._demote(["pp", "cp", "tp"], str(error), error)
            self._plan_layers(recorded=True)
        if not self.is_pipelined and not self.plan.is_partitioned:
            self.plan.partition_by_size()
        if self.has_step and setting.recompute is not None:
            self.recomputation = self._recomputation(setting.recompute)

    def _try_to_record(
        self, arguments: Sequence[Any] | None, refusal: str
    ) -> tuple[Sequence[Any] | None, Exception | None, str]:
        """Record the step; return its arguments, or the error, and why it cannot be in stages at all."""
        setting = self._setting
        is_demotable = setting.is_fitting and self.is_pipelined
        if is_demotable and (reason := why_no_stages(setting.module)):
            self.may_retry, refusal = False, f"StepError: {reason}"
        if refusal or not (self.is_pipelined or self._has_planners):
            return (), None, refusal
        try:
            return self._record_step(arguments), None, refusal
        except Exception as error:
            is_wrong = isinstance(error, BatchError) or (
                isinstance(error, UnfitError) and setting.options.pipeline_cuts
            )
            if is_wrong or not is_demotable:
                raise
            return (), error, refusal

    def _demote(self, axes: Sequence[str], reason: str, error: Exception | None) -> None:
        """Let the ranks along some axes hold shards, and run the step unpartitioned, if possible on shares of a batch.

        Raises:
            LayoutError: ``strict_layout=True``.
        """
        setting = self._setting
        strict = setting.options.strict_layout
        self.demotion = Demotion(setting.module, setting.world.mesh, axes, reason, strict=strict)
        self.mesh = self.demotion.mesh
        if not self.may_retry:
            self.demotion.announce(error)
        self._plan_on_mesh()

    @property
    def _has_planners(self) -> bool:
        return self._tensor_planner is not None or self.expert_planner is not None

    def _context(self, name: str) -> Any:
        return self._setting.contexts.of(name, delays_loggers=True)

    def _record_step(self, arguments: Sequence[Any] | None) -> Sequence[Any] | None:
        setting = self._setting
        with setting.contexts.advice():
            return record_first_step(
                setting.trainer,
                setting.module,
                self.runner,
                example=setting.options.example_batch,
                arguments=arguments,
                num_microbatches=setting.options.microbatches,
                splitter=setting.options.batch_splitter,
                context=self._context,
            )

    def _plan_on_mesh(self) -> None:
        """Make the runner, and the planners that observe layers while the first step is recorded."""
        setting, mesh = self._setting, self.mesh
        module, options, world = setting.module, setting.options, setting.world
        if hasattr(self, "metrics"):
            self.metrics.close()
        shared_by = mesh.group("shares" if mesh.sharded_axes else "pp")
        self.metrics = MetricSync(
            module,
            mesh.group("pp"),
            world.mesh.group("data"),
            mesh.group("data"),
            share_rank=shared_by.rank() if mesh.sharded_axes else 0,
            meet=world.rendezvous,
            launcher_world=world.as_launcher,
        )
        self.plan, self.runner = make_runner(
            module,
            mesh,
            shared_by,
            options,
            self._randomness,
            replica=world.data_rank,
            metrics=self.metrics,
            parts=lambda: self.parts,
            agree=world.broadcast,
            num_processes=world.num_processes,
            around_unpartitioned=lambda: (
                contextlib.nullcontext() if self.experts is None else self.experts.full_experts()
            ),
        )
        self._tensor_planner = self.expert_planner = None
        if mesh.size("tp") * mesh.size("cp") > 1:
            warn_across_nodes(setting.layout.tensor_parallel_size, world.num_processes, world.num_nodes)
            self._tensor_planner = TensorPlanner(
                module,
                world.mesh,
                sequence_parallel=options.sequence_parallel,
                plan=options.tensor_parallel_plan,
                folder=plan_folder(setting.trainer) if world.mesh.rank == 0 else None,  # the first plans for all
            )
            self.runner.unit_observers.append(self._tensor_planner.watching)
        if options.zero_stage and self.is_pipelined:
            self.runner.unit_observers.append(self.layer_reads.watching)
        # Tensor ranks may hold shards instead.
        has_ranks = setting.layout.expert_parallel_size > 1 or mesh.size("tp") > 1
        if has_ranks and ExpertPlanner.is_needed(module, setting.layout) and setting.is_fitting:
            self.expert_planner = ExpertPlanner(module, world.mesh, options, self._randomness, self.runner.guards)
            self.runner.unit_observers.append(self.expert_planner.watching)

    def _plan_layers(self, *, recorded: bool) -> None:
        """Decide which shard of each parameter this rank holds; nothing has changed if that is refused.

        Raises:
            LayoutError: Ranks have nothing to shard; on every rank.
        """
        self.shards = self.parts = self.experts = None
        self.zero_shardings = []
        if not recorded:
            return
        setting = self._setting
        shardings: list[AxisSharding] = []
        if (planner := self._tensor_planner) is not None:
            self.shards, self.plan_summary = planner.plan(self.expert_planner is not None), planner.summary
            shardings += self.shards.shardings
        if (experts := self.expert_planner) is not None:
            shardings += experts.plan(shardings, self.shards)
            self.experts, self.expert_summary = experts.shared, experts.summary
        if (3 if self.demotion is not None else setting.options.zero_stage) and setting.is_fitting:
            self.zero_shardings = zero_shardings(setting.module, self.mesh, shardings)
            shardings += self.zero_shardings
        if shardings:
            self.parts = LocalShards(setting.module, shardings)

    def _recomputation(self, recompute: Any) -> Recomputation:
        module, is_compiled = self._setting.module, self._setting.options.compile is not None
        if not self.is_pipelined:
            return recompute_plain_layers(module, recompute, compiled=is_compiled)
        assert self.plan.first is not None
        return recompute_layers(module, recompute, self.plan.first, self.plan.stages, compiled=is_compiled)
