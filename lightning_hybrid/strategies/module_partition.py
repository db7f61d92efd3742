"""How a module is cut at the start of a run: into stages if its step can be recorded, else into shards."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_hybrid.graph.partition import UnfitError
from lightning_hybrid.layout import LayoutError
from lightning_hybrid.memory.recompute import Recomputation
from lightning_hybrid.parts.gather_on_read import Guards
from lightning_hybrid.parts.local_shards import AxisCut, HeldParts
from lightning_hybrid.pipeline.plain_runner import PlainRunner
from lightning_hybrid.pipeline.results.metric_sync import MetricSync
from lightning_hybrid.pipeline.runner import StepRunner
from lightning_hybrid.randomness.keyed_draws import KeyedRandomness
from lightning_hybrid.step.batch.microbatch import BatchError
from lightning_hybrid.strategies.first_step_check import VerifyingStrategy
from lightning_hybrid.strategies.options.strategy_options import Options
from lightning_hybrid.strategies.start.first_recording import record_first_step, warn_of_mixing
from lightning_hybrid.strategies.start.plan_folder import plan_folder
from lightning_hybrid.strategies.start.runner_factory import runner_of_stages
from lightning_hybrid.strategies.techniques.expert_parallel import ExpertPlanner
from lightning_hybrid.strategies.techniques.recomputation import (
    recompute_layers,
    recompute_plain_layers,
)
from lightning_hybrid.strategies.techniques.tensor_parallel import (
    TensorPlanner,
    warn_across_nodes,
)
from lightning_hybrid.strategies.techniques.zero import (
    LayerReads,
    zero_cuts,
)
from lightning_hybrid.strategies.user_code.hook_context import why_no_stages

_SIZES = {
    "pp": "pipeline_parallel_size",
    "cp": "context_parallel_size",
    "tp": "tensor_parallel_size",
}


class CutStrategy(VerifyingStrategy):
    """Plans what each rank holds and runs of the user's module."""

    def __init__(self, *, options: Options, **lightning: Any) -> None:
        """Args: options: what was asked for. lightning: as ``VerifyingStrategy``."""
        super().__init__(
            sizes=options.mesh_sizes,
            microbatch_weight=options.microbatch_weight,
            save_distributed_checkpoint=options.save_distributed_checkpoint,
            async_checkpoint=options.async_checkpoint,
            **lightning,
        )
        self.options = options
        self._recompute = options.recompute
        self._recomputation: Recomputation | None = None
        self._plan_summary = self._expert_summary = ""
        self._whole_again: pl.Callback | None = None
        self._by_hand = False  # optimizers that the module steps share out their states alone
        self._instead = ""  # why the ranks of a pipeline hold shards
        self._shared_axes: list[str] = []  # of these ranks
        self._tries = 0  # training batches that may still show that the step can be cut after all
        self._zero_cuts: list[AxisCut] = []
        self._layer_reads = LayerReads()

    @property
    def _plain_runner(self) -> PlainRunner | None:
        """What runs steps as they are; None where they are replayed from a recording."""
        return self._runner if isinstance(self._runner, PlainRunner) else None

    @property
    def _guards(self) -> Guards | None:
        """Of steps that were not recorded."""
        return None if self._plain_runner is None else self._plain_runner.guards

    @property
    def _in_parts_by_layout(self) -> bool:
        """Whether a rank holds a part of the module only."""
        layout = self.layout
        over_replicas = (layout.data_shard_size > 1 and not self._by_hand) or layout.expert_parallel_size > 1
        return layout.pipeline_parallel_size > 1 or layout.shares_layers or over_replicas

    @property
    def _is_pipelined(self) -> bool:
        """Whether steps run in several stages."""
        return self.layout.pipeline_parallel_size > 1 and not self._instead

    @property
    def _compares_parts(self) -> bool:
        """Whether the first batch is compared with its parts, which nobody else does or has seen to."""
        is_compiled = self.options.compile is not None  # layers would be compiled for that alone
        return self._weight is None and not is_compiled and not self._verify_first_step

    @property
    def _zero_stage(self) -> int:
        return 3 if self._instead else self.options.zero_stage

    def _record(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        randomness: KeyedRandomness,
        arguments: Sequence[Any] | None = None,
        refusal: str = "",
    ) -> None:
        """Cut the module into what this rank runs: stages if its step can be recorded, else shards.

        Args:
            trainer: Of the run.
            module: The user's, whole.
            randomness: Keys what steps draw.
            arguments: Of the training step that comes next, if the run has begun.
            refusal: Why the step cannot be cut, where that is known on all ranks.
        """
        planners = self._plan_on(trainer, module, randomness)
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        error: Exception | None = None
        recorded: Sequence[Any] | None = ()
        if is_fitting and self._is_pipelined and (reason := why_no_stages(module)):
            self._tries, refusal = 0, f"StepError: {reason}"
        if not refusal and (self._is_pipelined or any(planners)):
            try:
                recorded = self._record_step(trainer, module, arguments)
            except Exception as raised:
                is_wrong = isinstance(raised, BatchError) or (
                    isinstance(raised, UnfitError) and self.options.pipeline_cuts
                )
                if is_wrong or not (is_fitting and self._is_pipelined):
                    raise
                error = raised
        if is_fitting and self._is_pipelined and (reason := refusal or self._reason_of_all(error)):
            self._share_instead(["pp"], reason, error)
            planners = self._plan_on(trainer, module, randomness)
            recorded = self._record_step(trainer, module, arguments) if any(planners) else ()
        runner, splitter = self._runner, self.options.batch_splitter
        if is_fitting and isinstance(runner, StepRunner) and recorded and self._compares_parts and splitter is None:
            with self._advised():
                warn_of_mixing(trainer, module, runner, recorded, self._context("training_step"))
        has_step = recorded is not None
        try:
            self._plan_layers(trainer, module, *planners, recorded=has_step)
        except LayoutError as error:  # on every rank
            if self.options.tensor_parallel_plan is not None or self.layout.expert_parallel_size > 1:
                raise
            self._tries *= arguments is None  # what the start hooks set may let layers be seen
            self._share_instead(["pp", "cp", "tp"], str(error), error)
            planners = self._plan_on(trainer, module, randomness)
            self._plan_layers(trainer, module, *planners, recorded=True)
        assert self._plan is not None
        if not self._is_pipelined and not self._plan.is_cut:
            self._plan.cut_by_size()
        self._run_layers(module, planners[1], recorded=has_step)

    def _reason_of_all(self, error: Exception | None) -> str:
        """Why the step cannot be recorded on some rank, the same text on every rank; nothing if it can; collective."""
        rows: list[Any] = [None] * self.layout.world_size
        dist.all_gather_object(rows, "" if error is None else f"{type(error).__name__}: {error}")
        return next(filter(None, rows), "")

    def _share_instead(self, axes: Sequence[str], reason: str, error: Exception | None) -> None:
        """From now on the ranks along some axes hold shards, and run the step as it is, on shares of it if that can be.

        Raises:
            LayoutError: The user wants the layout or nothing.
        """
        self._shared_axes = [axis for axis in axes if self.mesh.size(axis) > 1]
        self._instead = f"sharded instead of {'pipelined' if list(axes) == ['pp'] else 'cut'}: {reason}"
        self._wider_mesh = self.mesh.with_shards_over(self._shared_axes)
        if not self._tries:
            self._tell_of_shares(error)

    def _tell_of_shares(self, error: Exception | None = None) -> None:
        """Say that ranks hold shards, and why, now that no batch can change that.

        Raises:
            LayoutError: The user wants the layout or nothing.
        """
        module = self.lightning_module
        assert module is not None
        listed = ", ".join(f"{_SIZES[axis]}={self.mesh.size(axis)}" for axis in self._shared_axes)
        if self.options.strict_layout:
            reason = self._instead.partition(": ")[2]
            name = f"{type(module).__name__}.training_step"
            raise LayoutError(f"strict_layout=True, and {name} cannot be run under {listed}: {reason}") from error
        if not module.automatic_optimization:
            # Its optimizers take as many steps as it likes, so that shares would not give the numbers of one process.
            batch = "on the whole batch: it is smaller, not faster; data_parallel_size and zero_stage=3 are both"
        else:
            batch = "on its share of the batch"
        rank_zero_warn(
            f"{self._instead}. So each of the {self._shard_mesh.size('shares')} ranks of {listed} holds a shard of"
            f" every parameter, gradient and optimizer state, and runs the step {batch}. Set strict_layout=True to have"
            " this as an error"
        )

    def _record_step(
        self, trainer: pl.Trainer, module: pl.LightningModule, arguments: Sequence[Any] | None = None
    ) -> Sequence[Any] | None:
        assert self._runner is not None
        with self._advised():
            return record_first_step(
                trainer,
                module,
                self._runner,
                example=self.options.example_batch,
                arguments=arguments,
                num_microbatches=self.options.microbatches,
                splitter=self.options.batch_splitter,
                context=self._context,
            )

    def _plan_on(
        self, trainer: pl.Trainer, module: pl.LightningModule, randomness: KeyedRandomness
    ) -> tuple[TensorPlanner | None, ExpertPlanner | None]:
        """Make what runs steps, and what plans layers while the first one is recorded."""
        mesh = self._shard_mesh
        if self._metrics is not None:
            self._metrics.close()
        shared_by = mesh.group("shares" if mesh.shared_axes else "pp")
        self._metrics = MetricSync(
            module,
            mesh.group("pp"),
            self.mesh.group("data"),
            mesh.group("data"),
            share_rank=shared_by.rank() if mesh.shared_axes else 0,
            meet=self._meet,
            launcher_world=self.launcher_world,
        )
        self._plan, self._runner = runner_of_stages(
            module,
            mesh,
            shared_by,
            self.options,
            randomness,
            replica=self.data_rank,
            metrics=self._metrics,
            parts=lambda: self.parts,
            agree=self.broadcast,
            num_processes=self.num_processes,
            around_uncut=lambda: contextlib.nullcontext() if self._experts is None else self._experts.all_held(),
        )
        planner = None
        if mesh.size("tp") * mesh.size("cp") > 1:
            warn_across_nodes(self.layout.tensor_parallel_size, self.num_processes, self.num_nodes)
            planner = TensorPlanner(
                module,
                self.mesh,
                sequence_parallel=self.options.sequence_parallel,
                plan=self.options.tensor_parallel_plan,
                folder=plan_folder(trainer) if self.is_global_zero else None,  # the first rank plans for all
            )
            self._runner.watching_units.append(planner.watching)
        if self.options.zero_stage and self._is_pipelined:
            self._runner.watching_units.append(self._layer_reads.watching)
        experts = None
        has_ranks = self.layout.expert_parallel_size > 1 or mesh.size("tp") > 1  # tensor ranks may hold shards instead
        if has_ranks and ExpertPlanner.is_needed(module, self.layout) and trainer.state.fn == TrainerFn.FITTING:
            experts = ExpertPlanner(module, self.mesh, self.options, randomness, self._runner.guards)
            self._runner.watching_units.append(experts.watching)
        return planner, experts

    def _plan_layers(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        planner: TensorPlanner | None,
        experts: ExpertPlanner | None,
        *,
        recorded: bool,
    ) -> None:
        """Say what this rank will hold of each parameter; nothing has changed if that is refused.

        Raises:
            LayoutError: Ranks have nothing to share; on every rank.
        """
        self._shards = self._parts = self._experts = None
        self._zero_cuts = []
        if not recorded:
            return
        cuts: list[AxisCut] = []
        if planner is not None:
            self._shards, self._plan_summary = planner.plan(experts is not None), planner.summary
            cuts += self._shards.cuts
        if experts is not None:
            cuts += experts.plan(cuts, self._shards)
            self._experts, self._expert_summary = experts.shared, experts.summary
        if self._zero_stage and trainer.state.fn == TrainerFn.FITTING:
            self._zero_cuts = zero_cuts(module, self._shard_mesh, cuts)
            cuts += self._zero_cuts
        if cuts:
            self._parts = HeldParts(module, cuts)

    def _run_layers(self, module: pl.LightningModule, experts: ExpertPlanner | None, *, recorded: bool) -> None:
        """Let layers run as they are shared, gathered and recomputed."""
        assert self._plan is not None and self._runner is not None
        if recorded:
            reads = contextlib.nullcontext if self._shards is None else self._shards.outside_reads
            self._runner.shard_units(self._units, reads)
            if self._zero_cuts:
                self._runner.wrap_layers(lambda: self._zero.running() if self._zero else contextlib.nullcontext())
                self._runner.settle = lambda: None if self._zero is None else self._zero.settle()
        if recorded and self._recompute is not None:
            is_compiled = self.options.compile is not None
            if self._is_pipelined:
                assert self._plan.first is not None
                first, stages = self._plan.first, self._plan.stages
                self._recomputation = recompute_layers(module, self._recompute, first, stages, compiled=is_compiled)
            else:
                self._recomputation = recompute_plain_layers(module, self._recompute, compiled=is_compiled)
            self._runner.wrap_layers(self._recomputation.running)
        if recorded and experts is not None:  # outermost: what they run is gathered and recomputed where it is
            self._runner.wrap_layers(experts.running)
