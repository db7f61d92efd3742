"""The partition of a module over ranks: stages if its step can be recorded, else shards; and sharded layers."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from lightning_hybrid.batch.split import batch_size_of
from lightning_hybrid.collectives.agreement import agree_on_operations
from lightning_hybrid.errors import BatchError, LayoutError, LossError, UnfitError
from lightning_hybrid.graph.step_graph import StepGraph
from lightning_hybrid.params.shards import AxisSharding, LocalShards
from lightning_hybrid.pipeline.metrics import MetricSync
from lightning_hybrid.pipeline.staged import StepRunner
from lightning_hybrid.pipeline.stages.plan import TraceVariant
from lightning_hybrid.pipeline.stages.traces import Call
from lightning_hybrid.run.first_recording import record_first_step, warn_of_mixed_samples
from lightning_hybrid.run.run import RecordedBatch, Run
from lightning_hybrid.run.runner import make_runner
from lightning_hybrid.strategies.logs.phases import phase
from lightning_hybrid.strategies.state.layout_changes import Fallback
from lightning_hybrid.strategies.user_code.hooks import why_no_stages
from lightning_hybrid.techniques.order import techniques_of

if TYPE_CHECKING:
    from lightning_hybrid.tensor.plan import UnitPlan


class ModulePartition:
    """Decides which stages and shards of the module each rank holds; records the first step for that.

    Attributes:
        run: Of this rank, with what is decided so far.
        may_retry: Whether a training batch may still show that the step can be partitioned after all.
        fallback_error: The error on this rank for which ranks hold shards instead, if there was one.
        graph: The recorded training step, of one microbatch, where layers are planned by it.
    """

    def __init__(self, run: Run, *, may_retry: bool, find_tensor_plan: Callable[..., UnitPlan] | None = None) -> None:
        self.run, self.may_retry = run, may_retry
        self._find_tensor_plan = find_tensor_plan
        self.fallback_error: Exception | None = None
        self.graph: StepGraph | None = None
        self._setting = run.setting

    def _set(self, **decided: Any) -> None:
        self.run = dataclasses.replace(self.run, **decided)

    def decide(self, arguments: Sequence[Any] | None, refusal: str) -> Run:
        """Partition the module into stages if its step can be recorded, else into shards.

        ``refusal`` says why the step cannot be partitioned, where all ranks know that.
        """
        setting, options = self._setting, self._setting.options
        self._plan_on_mesh()
        recorded, error, refusal = self._try_to_record(arguments, refusal)
        if setting.is_fitting and self.run.is_pipelined and (reason := refusal or setting.world.first_reason(error)):
            self._fall_back(["pp"], reason, error)
            recorded = self._record_step(arguments) if self._needs_recording else ()
        if setting.is_fitting and recorded:
            self._agree_on_operations()
        runner = self.run.runner
        is_tried = setting.is_fitting and setting.checks_objective and options.batch_splitter is None
        if is_tried and isinstance(runner, StepRunner) and recorded:
            with setting.contexts.advice(), phase("comparing the loss of microbatches with that of their batch"):
                context = setting.contexts.of("training_step", delays_calls=True)
                step = setting.module.training_step
                call = Call("training_step", step, recorded[0], recorded[1:], context)
                warn_of_mixed_samples(setting, runner, call)
        if recorded and setting.is_fitting:
            assert self.run.runner is not None
            count = self.run.runner.count("training_step", recorded[0])
            self._set(batch=RecordedBatch(batch_size_of(recorded[0]), count))
        try:
            self._plan_layers(recorded=recorded is not None)
        except LayoutError as error:  # on every rank
            plain = self.run.plain_runner
            unrecorded = None if plain is None else plain.recording_error
            is_needed = options.tensor_parallel_plan is not None or options.spatial_parallel_size > 1
            if is_needed or setting.layout.joins_replicas:  # shards of a batch are no answer
                if unrecorded is not None:
                    raise unrecorded from unrecorded.__cause__
                raise
            # What the start hooks set may let layers be recorded; sizes of layers stay.
            self.may_retry &= arguments is None and unrecorded is not None
            reason = setting.world.first_reason(unrecorded) or str(error)  # without a recording no layer is sharded
            self._fall_back(["pp", "cp", "tp"], reason, unrecorded or error)
            self._plan_layers(recorded=True)
        if self.run.plain_runner is not None:
            self.run.plain_runner.forget_recording()
        plan = self.run.plan
        assert plan is not None
        if not self.run.is_pipelined and not plan.is_partitioned:
            plan.partition_by_size()
        for technique in self.run.techniques:
            technique.decide(self.run)
        return self.run

    def _try_to_record(
        self, arguments: Sequence[Any] | None, refusal: str
    ) -> tuple[Sequence[Any] | None, Exception | None, str]:
        """Record the step; return its arguments, or the error, and why it cannot be in stages at all."""
        setting, is_pipelined = self._setting, self.run.is_pipelined
        can_fall_back = setting.is_fitting and is_pipelined
        if can_fall_back and (reason := why_no_stages(setting.module)):
            self.may_retry, refusal = False, f"StepError: {reason}"
        if refusal or not (is_pipelined or self._needs_recording):
            return (), None, refusal
        try:
            return self._record_step(arguments), None, refusal
        except Exception as error:
            is_wrong = isinstance(error, UnfitError) and (setting.options.pipeline_cuts or self._has_all(error.reads))
            if isinstance(error, BatchError | LossError) or is_wrong or not can_fall_back:
                raise
            return (), error, refusal

    def _agree_on_operations(self) -> None:
        """Check that ranks of a replica have recorded the same: they would wait for each other in the first step."""
        assert self.run.plan is not None
        if (first := self.run.plan.first) is not None:
            for axis in ("pp", "tp"):
                if self.run.mesh.size(axis) > 1:
                    graph, group = first.recording.graph, self.run.mesh.group(axis)
                    agree_on_operations(graph.step, first.operations, group, axis)

    def _has_all(self, reads: Collection[str]) -> bool:
        """Whether these are all parameters that the module trains: then no other step of it has more units."""
        trained = {name for name, parameter in self._setting.module.named_parameters() if parameter.requires_grad}
        return bool(reads) and trained <= set(reads)

    def _fall_back(self, axes: Sequence[str], reason: str, error: Exception | None) -> None:
        """Let the ranks along some axes hold shards, and run the step unpartitioned, if possible on shares of a batch.

        Raises:
            LayoutError: ``strict_layout=True``.
        """
        setting = self._setting
        strict = setting.options.strict_layout
        self.fallback_error = error
        mesh, retries = setting.world.mesh, self.may_retry
        fallback = Fallback(setting.module, mesh, axes, reason, strict=strict, may_retry=retries)
        self._set(fallback=fallback, mesh=fallback.mesh)
        if not self.may_retry:
            fallback.announce_once_run(error)
        self._plan_on_mesh()

    @property
    def _needs_recording(self) -> bool:
        """Whether a technique needs the recording of a step."""
        return any(technique.records for technique in self.run.techniques)

    def _record_step(self, arguments: Sequence[Any] | None) -> Sequence[Any] | None:
        setting, runner = self._setting, self.run.runner
        assert runner is not None
        with setting.contexts.advice(), phase("recording the step on one batch"):
            return record_first_step(setting, runner, arguments)

    def _plan_on_mesh(self) -> None:
        """Make the runner, and the techniques that observe layers while the first step is recorded."""
        setting, mesh = self._setting, self.run.mesh
        if self.run.metrics is not None:
            self.run.metrics.close()
        metrics = MetricSync(setting.module, mesh.group("pp"), meet=setting.world.rendezvous)
        self.run.until_end.callback(metrics.close)  # also if no layout is found
        plan, runner = make_runner(setting, mesh, self.run.randomness, metrics, self)
        self._set(metrics=metrics, plan=plan, runner=runner, techniques=())
        self._set(techniques=techniques_of(self.run))
        if self._find_tensor_plan is not None:
            from lightning_hybrid.techniques.tensor import TensorParallel

            if (planned := self.run.technique(TensorParallel)) is not None:
                planned.find_with(self._find_tensor_plan)
        watches = [each.watching for each in self.run.techniques if each.watches(self.run)]
        runner.observe_units([*watches, self._keep_graph] if watches else [])

    def _keep_graph(self, variant: TraceVariant) -> AbstractContextManager[None]:
        self.graph = variant.recording.graph
        return contextlib.nullcontext()

    def _plan_layers(self, *, recorded: bool) -> None:
        """Decide which shard of each parameter this rank holds; nothing has changed if that is refused.

        Raises:
            LayoutError: Ranks have nothing to shard; on every rank.
        """
        if not recorded:
            self._set(techniques=())
            return
        shardings: list[AxisSharding] = []
        for technique in reversed(self.run.techniques):
            shardings += technique.place(self.run, shardings)
        self._set(parts=LocalShards(self._setting.module, shardings))
