"""The setting of a run: the user's objects, the ranks and the options, which stay when the layout changes."""

from __future__ import annotations

import dataclasses

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn

from lightning_hybrid.layout import ParallelLayout
from lightning_hybrid.memory.recompute.policies import Recompute
from lightning_hybrid.memory.saved_activations.requests import ActivationRequests
from lightning_hybrid.precision.hybrid import HybridPrecision
from lightning_hybrid.replicate.batch_norm import SyncedBatchNorm
from lightning_hybrid.run.contexts import StepContexts
from lightning_hybrid.strategies.options.options import Options
from lightning_hybrid.strategies.start.empty_init import EmptyInit
from lightning_hybrid.strategies.state.weight_averaging import WeightAverages
from lightning_hybrid.strategies.world.ranks import RankWorld


def shards_module(layout: ParallelLayout) -> bool:
    """Return whether a rank holds a shard of the module only."""
    return layout.pipeline_parallel_size > 1 or layout.shards_layers or layout.shards_replicas


def needs_runner(options: Options, layout: ParallelLayout) -> bool:
    """Return whether a runner of this package runs the steps; the user's step runs unchanged otherwise."""
    in_microbatches = (options.microbatches or 1) > 1 or options.microbatch_weight is not None
    in_microbatches |= options.microbatch is not None
    return in_microbatches or shards_module(layout)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """The user's objects, the ranks and the options of a run; a change of the layout leaves them as they are.

    Attributes:
        trainer: Of the run.
        module: The user's.
        world: The ranks.
        options: The arguments of the strategy.
        precision: The plugin of the strategy.
        contexts: Entered around steps of the user.
        recompute: Activation checkpointing, by an option or a callback.
        saved_activations: Their offload and compression, by callbacks.
        norms: BatchNorm over the replicas, if the Trainer asks for it.
        averages: Copies of the module that callbacks keep.
        empty: The initial values of a module that was built without storage.
        seed: Keys random numbers.
    """

    trainer: pl.Trainer
    module: pl.LightningModule
    world: RankWorld
    options: Options
    precision: Precision
    contexts: StepContexts
    recompute: Recompute | None
    saved_activations: ActivationRequests
    norms: SyncedBatchNorm | None
    averages: WeightAverages
    empty: EmptyInit | None
    seed: int

    @property
    def layout(self) -> ParallelLayout:
        """The parallel sizes."""
        return self.world.layout

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.world.device

    @property
    def is_fitting(self) -> bool:
        """Whether the run trains."""
        return self.trainer.state.fn == TrainerFn.FITTING

    @property
    def is_manual(self) -> bool:
        """Whether the module calls backward and optimizers itself (manual optimization)."""
        return not self.module.automatic_optimization

    @property
    def needs_runner(self) -> bool:
        """Whether a runner of this package runs the steps."""
        return needs_runner(self.options, self.layout)

    @property
    def shards_module(self) -> bool:
        """Whether a rank holds a shard of the module only."""
        return shards_module(self.layout)

    @property
    def mesh_precision(self) -> HybridPrecision:
        """The precision plugin over several ranks; a TypeError if the user's has behaviour of its own."""
        plugin = self.precision
        return plugin if isinstance(plugin, HybridPrecision) else HybridPrecision.of(plugin)

    @property
    def steps_in_float32(self) -> bool:
        """Whether the optimizers step bfloat16 parameters in float32."""
        return isinstance(self.precision, HybridPrecision) and self.precision.steps_in_float32

    def dtype_of_gradient(self, parameter: torch.Tensor) -> torch.dtype:
        """The dtype in which gradients of a parameter, of any shape, are added."""
        plugin = self.precision
        return plugin.dtype_of_gradient(parameter) if isinstance(plugin, HybridPrecision) else parameter.dtype

    @property
    def sizes_of_states(self) -> dict[str, bool]:
        """The arguments of `StateSizes`: steps in float32, copies that are kept, trials of a user's own step.

        Where no rank holds shards, sizes of states are for the start table alone: no code of the user runs for it.
        """
        plugin, runs_user_code = self.precision, self.shards_module
        if not isinstance(plugin, HybridPrecision):
            return {"runs_user_code": runs_user_code}
        float32 = {"in_float32": plugin.steps_in_float32, "copies": plugin.master_weights}
        return {**float32, "runs_user_code": runs_user_code}

    @property
    def checks_objective(self) -> bool:
        """Whether to compare the first batch with its microbatches: unless the user's weights make that vain."""
        return self.options.microbatch_weight is None
