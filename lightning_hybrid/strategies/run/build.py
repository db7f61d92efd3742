"""The construction of a run, in order: record and partition, drop other stages, shard, connect layers and hooks."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lightning_hybrid.parts.gradient_hooks import on_full_gradient
from lightning_hybrid.randomness.keyed_draws import KeyedRandomness
from lightning_hybrid.strategies.options.options import compile_options
from lightning_hybrid.strategies.run.budget import profile_for_budget
from lightning_hybrid.strategies.run.full_or_sharded_module_state import FullOrShardedState
from lightning_hybrid.strategies.run.run import Optimization, Run
from lightning_hybrid.strategies.run.setting import Setting
from lightning_hybrid.strategies.world.callbacks import FullAtTrainEnd, around_validation

if TYPE_CHECKING:
    from lightning_hybrid.full_params.cross_stage_reads_in_hooks import CrossStageReads
    from lightning_hybrid.pipeline.stages.plan import StagePlan
    from lightning_hybrid.strategies.run.partition import ModulePartition
    from lightning_hybrid.strategies.user_code.full_parameters_in_hooks import HookReads


class RunOwner(Protocol):
    """The owner of a run, which replaces it when the layout changes."""

    state: FullOrShardedState
    setting: Setting
    run: Run
    optimization: Optimization

    @property
    def gradients_are_complete(self) -> bool:
        """Whether gradients are summed over stages and averaged over replicas now."""

    @property
    def is_verifying(self) -> bool:
        """Whether the next step is compared with one process."""

    def averaged_state(self, copy: nn.Module) -> dict[str, Any]:
        """Return the state dict of a copy of the module as a checkpoint has it; collective."""

    def make_full(self) -> None:
        """Gather the full module on every rank."""

    def change_layout(self, arguments: Sequence[Any], refusal: str, *, may_retry: bool) -> bool:
        """Build the run again between two steps, as ``build_run``; return ``may_retry`` as it is now; collective."""


def build_run(
    setting: Setting,
    owner: RunOwner,
    *,
    may_retry: bool,
    arguments: Sequence[Any] | None = None,
    refusal: str = "",
    fills_empty: bool = False,
) -> tuple[Run, ModulePartition | None, bool]:
    """Partition and shard the module, which is full, and connect layers and hooks to the shards; collective.

    Args:
        setting: Of the run.
        owner: Replaces the run when the layout changes.
        may_retry: Whether a training batch may still show that the step can be partitioned after all.
        arguments: Of the training step that comes next, if the run has begun.
        refusal: Why the step cannot be partitioned, where that is known on all ranks.
        fills_empty: Whether the module was built without storage.

    Returns:
        The run; the decisions on it, if there were any; whether all initial values were assigned.
    """
    randomness = KeyedRandomness(setting.seed, setting.device)
    run = Run(setting=setting, mesh=setting.world.mesh, until_end=contextlib.ExitStack())
    partition: ModulePartition | None = None
    with _closed_on_error(run):
        if setting.needs_runner:
            from lightning_hybrid.strategies.run.partition import ModulePartition

            partition = ModulePartition(run, randomness, may_retry=may_retry)
            run = _drop_other_stages(partition.decide(arguments, refusal), owner)
        else:
            run = recompute_without_runner(run)
        run = _store_activations(run, partition, randomness)
        drop_plan = None if owner.state.is_full else run.plan
        is_filled = fills_empty and setting.empty is not None and setting.empty.fill(drop_plan)
        if run.parts is not None:
            run.parts.shard_parameters(setting.module)
            run = _shard_over_replicas(run, partition)
        _connect_shards(run, randomness)
        setting.averages.follow(setting.module, drop_plan, run.parts, owner.averaged_state)
        run = compile_layers(run, randomness)
        if partition is not None:
            _connect_layers(run, partition, owner)
            _agree_on_broken_steps(run)
        run = _chunk_losses(run, partition)
        profile_for_budget(run, owner)
    return run, partition, is_filled


def recompute_without_runner(run: Run) -> Run:
    """Choose the layers that are recomputed where the user's steps run unchanged, if the user wants it."""
    setting = run.setting
    if setting.recompute is None:
        return run
    from lightning_hybrid.strategies.techniques.recompute import (
        budgeted_layers,
        recompute_plain_layers,
    )

    is_compiled = setting.options.compile is not None
    syncs_norms = setting.norms is not None
    budget = budgeted_layers(setting.recompute, setting.world, setting.options, syncs_norms=syncs_norms)
    recomputation = recompute_plain_layers(setting.module, setting.recompute, compiled=is_compiled, budget=budget)
    return dataclasses.replace(run, recomputation=recomputation)


def _store_activations(run: Run, partition: ModulePartition | None, randomness: KeyedRandomness) -> Run:
    """Choose how the tensors that layers save are stored, if the user wants it."""
    setting = run.setting
    if not setting.saved_activations or not setting.is_fitting:
        return run
    from lightning_hybrid.strategies.techniques.activations import microbatch_key, store_activations

    batch = None if partition is None else partition.batch
    activations = store_activations(
        setting.saved_activations,
        setting.module,
        setting.device,
        run.plan if run.is_pipelined else None,
        num_microbatches=1 if batch is None else batch.num_microbatches,
        is_compiled=setting.options.compile is not None,
        microbatch_key=partial(microbatch_key, setting.trainer, setting.seed, setting.world.data_rank, randomness),
        until_end=run.until_end,
    )
    return dataclasses.replace(run, activations=activations)


@contextlib.contextmanager
def _closed_on_error(run: Run) -> Iterator[None]:
    """Restore the user's objects if the run cannot be built."""
    try:
        yield
    except BaseException:
        run.until_end.close()
        raise


def _drop_other_stages(run: Run, owner: RunOwner) -> Run:
    """Keep only this rank's stages; hooks find the module as one process has it."""
    setting, plan = run.setting, run.plan
    assert plan is not None
    if not (plan.is_partitioned and setting.shards_module):
        return run
    from lightning_hybrid.pipeline.stages.plan import drop_remote_parameters

    drop_remote_parameters(plan)
    owner.state.shard(run.parts)
    global_reads, hook_reads = _connect_hooks(run, owner, plan)
    if setting.is_fitting:
        run.until_end.callback(FullAtTrainEnd(owner.make_full).enter(setting.trainer))
    return dataclasses.replace(run, global_reads=global_reads, hook_reads=hook_reads)


def _connect_hooks(run: Run, owner: RunOwner, plan: StagePlan) -> tuple[CrossStageReads | None, HookReads]:
    """Let hooks of the user read gradients and parameters of all stages."""
    from lightning_hybrid.full_params.check_ranks_read_same_values import HookAgreement
    from lightning_hybrid.full_params.cross_stage_reads_in_hooks import CrossStageReads
    from lightning_hybrid.full_params.skip_absent_parameters_in_conversions import skip_absent_parameters
    from lightning_hybrid.pipeline.stages.plan import buffer_owners
    from lightning_hybrid.strategies.user_code.full_parameters_in_hooks import HookReads, summarize_full_parameters
    from lightning_hybrid.strategies.user_code.gather_parameters_for_dataloaders import wrap_loaders
    from lightning_hybrid.strategies.user_code.wrap_hooks_in_parameter_reads import wrap_user_hooks

    setting, undo = run.setting, run.until_end
    trainer, module = setting.trainer, setting.module
    parameters = dict(module.named_parameters())
    holders = {name: plan.ranks_of(name) for name in parameters}
    stages, meet = None, partial(setting.world.rendezvous, compares=False)
    if plan.num_ranks > 1:
        group, owners = setting.world.mesh.group("pp"), partial(buffer_owners, plan)
        undo.callback(skip_absent_parameters(module))
        stages = CrossStageReads(parameters, holders, group, setting.device, meet, buffer_owners=owners)
    reads = HookReads(
        stages,
        run.parts,
        parameters,
        HookAgreement(run.mesh.group("holders"), setting.device, meet, "layer's"),
        over_replicas=bool(run.gathered_shardings) or run.experts is not None,
    )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ModelSummary):
            undo.callback(summarize_full_parameters(callback, reads))
    assert run.runner is not None

    def in_shards() -> bool:
        return not owner.state.is_full

    loaders = wrap_loaders(
        trainer,
        module,
        run.runner.unpartitioned,
        is_sharded=in_shards,
        active=lambda: owner.run.active,
        synchronizes=lambda refers: _loaders_synchronize(owner.run, refers),
    )
    undo.callback(loaders)
    hooks = wrap_user_hooks(
        trainer,
        module,
        reads,
        latest=lambda: owner.run.hook_reads or reads,
        is_sharded=in_shards,
        complete=lambda: owner.gradients_are_complete,
        passes=setting.world.passes,
        copies=lambda: setting.averages.copies,
    )
    undo.callback(hooks)
    return stages, reads


def _loaders_synchronize(run: Run, refers: bool) -> bool:
    """Return whether fetches of a loader synchronize with those of other replicas; collective."""
    world = run.setting.world
    with world.as_launcher():
        if run.experts is not None or not world.decide(refers, all_ranks=False):
            return False
        run.active.allow_rank_local_reads(run.mesh)
    return True


def _shard_over_replicas(run: Run, partition: ModulePartition | None) -> Run:
    """Shard parameters over replicas, and gather them where they are used."""
    setting, undo = run.setting, run.until_end
    if run.experts is not None:
        assert run.parts is not None
        begin = partial(run.experts.begin_evaluation, run.parts)
        undo.callback(around_validation(setting.trainer, begin, run.experts.end_evaluation))
    if partition is None:
        return run
    # One so far: what two would do in a step is not combined yet.
    [active] = [technique.build(run, partition) for technique in run.techniques] or [run.active]
    if run.gathered_shardings:
        undo.callback(around_validation(setting.trainer, active.begin_evaluation, active.end_evaluation))
    return dataclasses.replace(run, active=active)


def _connect_shards(run: Run, randomness: KeyedRandomness) -> None:
    """Connect sharded layers to random numbers, and code outside of them to gathered parameters."""
    if run.shards is not None:
        from lightning_hybrid.tensor.shard_state.tensor_parallel_random_draws import KeyedDraws

        assert run.runner is not None
        run.shards.be_ready(partial(KeyedDraws, device=run.setting.device), rank_zero_warn, randomness.uncounted)
        run.shards.gather_on_read(run.runner.guards)
        if (runner := run.plain_runner) is not None:
            runner.gather_outputs(any(plan.vocabulary or plan.positions for plan in run.shards.plans.values()))
    if run.experts is not None:
        run.experts.be_ready()
    if run.parts is not None and run.runner is not None:
        parts, names = run.parts, {id(parameter): name for name, parameter in run.setting.module.named_parameters()}
        run.runner.guards.gradient_hook = lambda parameter, registration, hook: on_full_gradient(
            registration, parts, names[id(parameter)], hook
        )


def compile_layers(run: Run, randomness: KeyedRandomness) -> Run:
    """Choose the layers of this rank that are compiled when they run, if the user wants it."""
    setting, plan = run.setting, run.plan
    options = compile_options(setting.options.compile)
    if options is None:
        return run
    from lightning_hybrid.step.recording.choose_units import choose_units
    from lightning_hybrid.strategies.techniques.compile import CompiledUnits, share_compile_processes

    module, has_runner = setting.module, run.runner is not None
    synced = setting.norms is not None
    compiled = CompiledUnits(module, options, setting.device, in_microbatches=has_runner, synced_norms=synced)
    if plan is None:
        compiled.choose()
    else:
        if plan.first is not None:
            units, drawing = plan.first.recording.units, plan.first.recording.graph.draws
        else:  # no step was recorded
            units, drawing = choose_units(module, 1), tuple(name for name, _ in module.named_modules())
        compiled.choose(units, run.shards, drawing, randomness)
    run.until_end.enter_context(share_compile_processes(setting.world.num_processes))
    return dataclasses.replace(run, compiled=compiled)


@contextlib.contextmanager
def running_layers(run: Run, owner: RunOwner) -> Iterator[None]:
    """Run layers sharded and compiled inside."""
    with contextlib.ExitStack() as stack:
        if run.shards is not None:
            stack.enter_context(run.shards.running())
        # Compiled layers draw other random numbers than the one process that they would be compared with.
        if run.compiled is not None and not (owner.is_verifying and run.compiled.draws):
            stack.enter_context(run.compiled.running())
        yield


def _connect_layers(run: Run, partition: ModulePartition, owner: RunOwner) -> None:
    """Let the runner execute layers as they are sharded, gathered and recomputed."""
    runner, active = run.runner, run.active
    assert runner is not None
    if not partition.has_step:
        return
    runner.wrap_layers(lambda: running_layers(run, owner))
    if run.shards is not None:
        runner.wrap_step(run.shards.outside_reads)
    if run.activations is not None:  # inside ZeRO and recomputation, which take their tensors first
        running = run.activations.running
        runner.wrap_layers(lambda: running(is_exact=runner.is_comparing))
    if run.gathered_shardings:
        runner.wrap_layers(active.running)
        runner.settle = active.settle
    routing = frozenset() if run.experts is None else run.experts.routing()
    if run.recomputation is not None:
        runner.wrap_layers(partial(run.recomputation.running, without=routing))
    if partition.expert_planner is not None:  # around these: what they run is gathered and recomputed where it is
        runner.wrap_layers(partition.expert_planner.running)
    if run.recomputation is not None and routing:  # with its exchange: a repeated forward would meet no experts
        runner.wrap_layers(partial(run.recomputation.running, only=routing))


def _chunk_losses(run: Run, partition: ModulePartition | None) -> Run:
    """Compute the losses of this rank's output heads in chunks, if the user wants it."""
    setting = run.setting
    option = setting.options.chunked_loss
    if option is False or (partition is not None and not partition.has_step):
        return run
    from lightning_hybrid.memory.chunked_loss.find_output_heads import find_output_heads
    from lightning_hybrid.memory.chunked_loss.output_heads import ChunkedLoss

    sharded = {name for axis in (() if run.shards is None else run.shards.shardings) for name in axis.placements}
    is_compiled, counted = setting.options.compile is not None, option is not True
    heads = find_output_heads(setting.module, sharded=sharded, is_compiled=is_compiled, any_size=counted)
    if not heads and (sharded or run.is_pipelined):
        return run  # tensor ranks shard the logits, or another stage has them
    is_first = all(run.mesh.rank_in(axis) == 0 for axis in ("data", "cp", "tp"))  # of its stage
    losses = ChunkedLoss(
        heads,
        option if counted else None,
        around=run.active.gathered,
        inform=logging.getLogger(pl.__name__).info if is_first else lambda _: None,
        warn=warnings.warn if is_first else lambda _: None,
    )
    if (runner := run.runner) is not None:
        runner.wrap_step(losses.step)
        runner.wrap_layers(losses.running)  # outermost: heads are not computed where they are called
    return dataclasses.replace(run, chunked_loss=losses)


def _agree_on_broken_steps(run: Run) -> None:
    """Let replicas agree on steps that may take another trace while they run."""
    setting, runner = run.setting, run.staged_runner
    if runner is None or not setting.is_fitting or run.plan is None:
        return
    # What experts exchange in the middle of a step cannot be brought to its end without it, and a parameter that was
    # stepped in the backward has no old value.
    is_alone = run.experts is None and not setting.options.verify_first_step
    if is_alone and not setting.options.optimizer_in_backward:
        runner.roll_back_broken_steps(setting.world.any_replica)
