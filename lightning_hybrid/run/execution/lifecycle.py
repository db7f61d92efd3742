"""The lifecycle of a run: checks, agreement of the ranks, layouts one after the other, and a full module at its end."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn
from torch.optim import Optimizer

from lightning_hybrid.memory.recompute.policies import Recompute
from lightning_hybrid.params.shards import LocalShards
from lightning_hybrid.randomness.keyed import KeyedRandomness
from lightning_hybrid.run.build import build_run
from lightning_hybrid.run.checkpoint_files import CheckpointFiles
from lightning_hybrid.run.connected import Optimization
from lightning_hybrid.run.contexts import StepContexts
from lightning_hybrid.run.description.lines import describe_batch, knows_batches
from lightning_hybrid.run.description.monitors import connect_monitors
from lightning_hybrid.run.description.table import announce_run
from lightning_hybrid.run.execution.first_step import FirstStepCheck
from lightning_hybrid.run.execution.guard import BatchSizeTrials, MemoryGuard, searches_batch_size
from lightning_hybrid.run.execution.layout import LayoutChooser, with_cuts_of_checkpoint
from lightning_hybrid.run.execution.steps import StepExecution, StepPolicy
from lightning_hybrid.run.module_state import FullOrShardedState
from lightning_hybrid.run.optimization import connect_optimizers
from lightning_hybrid.run.run import Run
from lightning_hybrid.run.setting import Setting
from lightning_hybrid.strategies.logs.reduction import drop_calls, silence_sync_dist_advice
from lightning_hybrid.strategies.logs.throughput import count_devices_in_throughput
from lightning_hybrid.strategies.options.options import Options
from lightning_hybrid.strategies.start.callbacks import average_lr_search_loss
from lightning_hybrid.strategies.start.empty_init import EmptyInit
from lightning_hybrid.strategies.start.initial_sync import build_optimizers, synchronize_start
from lightning_hybrid.strategies.state.partial import check_is_full
from lightning_hybrid.strategies.state.weight_averaging import WeightAverages
from lightning_hybrid.strategies.user_code.schedules import check_schedules, explain_schedule
from lightning_hybrid.strategies.world.ranked_strategy import RankedStrategy
from lightning_hybrid.techniques.batch_norm import synced_norms
from lightning_hybrid.techniques.order import check_techniques

if TYPE_CHECKING:
    from lightning_hybrid.run.partition import ModulePartition


class RunLifecycle:
    """One run of a Trainer on one module, from `Strategy.setup` to `Strategy.teardown`.

    Attributes:
        setting: What stays when the layout changes.
        state: The state of the module.
        run: The present layout.
        optimization: Its reducers and optimizers.
        execution: Runs steps.
        first_step: Compares the first one with one process.
        changes: Changes the layout between steps.

    Raises:
        LayoutError: There is nothing to shard.
        ValueError: Options do not go with this module.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        strategy: RankedStrategy,
        *,
        state: FullOrShardedState,
        files: CheckpointFiles,
        recompute: Recompute | None,
        evaluated: Iterator[int],
    ) -> None:
        check_is_full(module)
        is_fitting = trainer.state.fn == "fit"
        world, precision = strategy.world, strategy.precision_plugin
        world.until_end.callback(silence_sync_dist_advice())
        options = with_cuts_of_checkpoint(trainer, strategy.options, world.layout)
        if (float8 := getattr(precision, "float8", None)) is not None:
            float8.check_layout(world.layout)
        if recompute is not None:
            from lightning_hybrid.strategies.user_code.hooks import check_scripted

            check_scripted(module)
        norms = None
        if is_fitting:
            check_techniques(options, world.mesh, precision, is_manual=not module.automatic_optimization)
            norms = synced_norms(strategy._layer_sync, world.mesh, options.verify_first_step)
        self.state, self._files = state, files
        self._partition: ModulePartition | None = None  # of a layout that is not announced yet
        self._is_announced = self._lacks_batches = False
        self.optimization = Optimization()
        self.setting = Setting(
            trainer=trainer,
            module=module,
            world=world,
            options=options,
            precision=precision,
            contexts=StepContexts(trainer, module, world, precision),
            recompute=recompute,
            saved_activations=strategy.saved_activations,
            norms=norms,
            averages=WeightAverages(trainer),
            empty=None,
            seed=0,
        )
        # A step that is recorded before there is a run may call backwards and optimizers (manual optimization).
        self.run = Run(
            setting=self.setting,
            randomness=KeyedRandomness(0, world.device),
            mesh=world.mesh,
            parts=LocalShards(module, ()),
            until_end=contextlib.ExitStack(),
        )
        self.execution = StepExecution(self, evaluated)
        self.changes = LayoutChooser(self, self.execution)
        self.first_step = FirstStepCheck(self)
        if is_fitting and options.verify_first_step:
            self.first_step.begin()
        self.execution.follow(self._policies())

    def begin(self, empty: EmptyInit | None) -> bool:
        """Synchronize the initial weights of all ranks, and build the run; collective.

        ``empty`` has the initial values of a module without storage; returns whether all of them have been assigned.
        """
        setting, world = self.setting, self.setting.world
        if setting.needs_runner:  # before the module is sharded
            from lightning_hybrid.strategies.logs.reduction import log_full_graph

            world.until_end.callback(log_full_graph(setting.trainer, setting.module, is_empty=empty is not None))
        sizes = world.layout.world_size, world.layout.data_parallel_size
        world.until_end.callback(count_devices_in_throughput(setting.trainer, *sizes))
        if empty is not None:
            empty.hide(setting.module)
        world.check_resumed(setting.trainer.ckpt_path)
        # Weights and generators must agree before anything is drawn or recorded.
        copies = setting.averages.copies
        seed = synchronize_start(setting.module, world.mesh, world.data_rank, world.device, copies)
        self.setting = setting = dataclasses.replace(setting, empty=empty, seed=self._files.adopt_seed(seed))
        if setting.is_fitting and empty is None:
            build_optimizers(setting.trainer, setting.module, world, copies)
        may_retry, is_filled = self._lay_out(may_retry=self.changes.may_retry, fills_empty=empty is not None)
        if setting.is_fitting and empty is not None:  # only now are there values to read, in shards
            with nullcontext() if self.run.hook_reads is None else self.run.hook_reads.hook("configure_optimizers"):
                setting.trainer.strategy.setup_optimizers(setting.trainer)
        self.changes.restrict(may_retry)
        return is_filled

    def connect_optimizers(self, built_with: frozenset[int] | None = None) -> None:
        """Let the optimizers of the Trainer step the local shards; ``built_with`` as `connect_optimizers` of a run."""
        optimizers: list[Optimizer] = self.setting.trainer.optimizers
        # Some make states when they are built: of full parameters.
        states = [optimizer.state_dict() for optimizer in optimizers] if self.run.is_sharded else []
        made_states = any(state.get("state") for state in states)
        for optimizer in optimizers if made_states else ():
            optimizer.state.clear()
        self.optimization = connect_optimizers(self.run, self, optimizers, built_with)
        self.state.follow(self.run, self.optimization)
        if made_states:
            self.state.optimizers.load(optimizers, states)
        for technique in self.run.techniques:
            technique.connect(self.run, self.optimization)
        self._announce()

    def move_optimizers(self) -> None:
        """Move optimizer states to the device unless they are offloaded; let copies and pickles have full states."""
        optimizers = self.setting.trainer.optimizers
        if not self.setting.is_fitting:
            return  # there are none, or those of an earlier fit
        if not self.optimization.moved:
            _optimizers_to_device(optimizers, self.setting.device)
        self.state.optimizers.pickle_in_full(optimizers)

    def _policies(self) -> tuple[StepPolicy, ...]:
        """What is done about training steps, in order; all ranks stop together where larger batches are tried."""
        setting, world = self.setting, self.setting.world
        policies: tuple[StepPolicy, ...] = self.first_step, self.changes
        fits = setting.is_fitting and setting.options.microbatch is not None
        if not fits and searches_batch_size(setting.trainer) and world.layout.world_size > 1:
            BatchSizeTrials(self, self.execution)
        if not setting.is_fitting or not (fits or setting.needs_runner):
            return policies
        from lightning_hybrid.run.execution.fit import (
            FittingMicrobatches,
            WeightedMicrobatches,
            check_microbatch_option,
        )

        if not fits:
            return *policies, WeightedMicrobatches(self.execution, None)
        check_microbatch_option(setting)
        fit = FittingMicrobatches(setting, MemoryGuard(world))
        return *policies, WeightedMicrobatches(self.execution, fit), fit

    def explain(self, error: BaseException) -> None:
        """Add to an error that ends the run what to do, where that is known."""
        self.execution.explain(error)
        explain_schedule(error, self.setting.trainer)

    # -- the owner of the run -----------------------------------------------------------------------------------------

    @property
    def gradients_are_complete(self) -> bool:
        """Whether gradients are summed over stages and averaged over replicas now."""
        return self.execution.gradients_are_complete

    @property
    def is_verifying(self) -> bool:
        """Whether the next step is compared with one process."""
        return self.first_step.is_pending

    def averaged_state(self, copy: nn.Module) -> dict[str, Any]:
        """Return the state dict of a copy of the module as a checkpoint has it; collective."""
        return self._files.averaged_state(copy)

    def use_options(self, options: Options) -> None:
        """Run under other options from the next layout on."""
        self.setting = dataclasses.replace(self.setting, options=options)
        self.run = dataclasses.replace(self.run, setting=self.setting)

    def make_full(self, *, for_run: bool = False) -> None:
        """Gather the full module on every rank, to train it on under another layout or at the end; collective."""
        strategy: Any = self.setting.trainer.strategy
        strategy.make_full(for_run=for_run)  # hooks of the user put their reads aside for this call

    def change_layout(self, arguments: Sequence[Any], refusal: str, *, may_retry: bool) -> bool:
        """Build the run again between two steps, as `RunOwner.change_layout`."""
        from lightning_hybrid.run.execution.agreement import check_layout
        from lightning_hybrid.strategies.state.layout_changes import FullGradients

        setting, run = self.setting, self.run
        optimizers: list[Optimizer] = setting.trainer.optimizers
        assert run.plan is not None
        differ = any(technique.steps_alone(run) for technique in run.techniques)
        states = self.state.optimizers.full_states(optimizers, of_each_copy=differ)
        gradients = FullGradients(
            setting.module,
            run.plan,
            run.parts,
            setting.world.mesh,
            setting.device,
            are_complete=self.gradients_are_complete,
            replicas="dp_shard" if differ else "data",
        )
        for technique in run.techniques:
            technique.carry(run, self.state.optimizers.full_state)
        for optimizer in optimizers:
            optimizer.state.clear()  # what it does is tried on a copy without any
        self.make_full(for_run=True)
        built_with = self.optimization.step_hooks
        self._close_run()
        may_retry, _ = self._lay_out(may_retry=may_retry, arguments=arguments, refusal=refusal)
        self.connect_optimizers(built_with)
        with setting.world.as_launcher():
            check_layout(self.run, self.optimization)
        self.state.optimizers.load(optimizers, states)
        gradients.give(setting.module, self.run.plan, self.run.parts)
        return may_retry

    def _lay_out(self, *, may_retry: bool, **how: Any) -> tuple[bool, bool]:
        self.run, self._partition, is_filled = build_run(self.setting, self, may_retry=may_retry, **how)
        self.state.follow(self.run, self.optimization)
        if not self.setting.is_fitting:  # there will be no optimizers
            self._announce()
        return may_retry if self._partition is None else self._partition.may_retry, is_filled

    def _announce(self) -> None:
        """Print the layout, once it has optimizers if it trains."""
        setting, is_first = self.setting, not self._is_announced
        announce_run(self.run, with_environment=is_first)
        connect_monitors(self.run, None if self._partition is None else self._partition.graph)
        if is_first and setting.is_fitting and setting.shards_module:
            self._files.warn_of_size(setting)
        self._is_announced, self._partition = True, None
        self._lacks_batches = setting.is_fitting and not knows_batches(self.run)

    def on_train_start(self) -> None:
        """Check schedules; print the lines on epochs and batches that the start lacked, as the loader is made by now.

        Learning-rate searches of callbacks decide by the mean loss, equal on all ranks.
        """
        trainer, world = self.setting.trainer, self.setting.world
        self._files.report_epochs()
        check_schedules(trainer)
        world.until_end.callback(average_lr_search_loss(trainer, world.mesh))
        if self._lacks_batches:
            rank_zero_info(describe_batch(self.run, self.run.batch, None))
        self._lacks_batches = False

    # -- steps --------------------------------------------------------------------------------------------------------

    def checked_closure(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Check that an optimizer steps as in one process; return its closure, which checks gradients too."""
        connected = self.optimization.connected
        return closure if connected is None else connected.check(optimizer, closure)

    # -- the end ------------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Leave a full module on every rank, and restore the user's objects."""
        self.make_full()
        if not self.state.has_failed:
            self.setting.world.count_replicas_once(self.setting.trainer)
        drop_calls(self.setting.module)
        self.setting.averages.leave()
        self._close_run()

    def _close_run(self) -> None:
        self.execution.close()
        self.run, self.optimization = self.run.close(), Optimization()
        self.state.follow(self.run, self.optimization)
