"""The gradients and optimizers of a run: reducers, and steps that read, shard or offload."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import LBFGS, Optimizer

from lightning_hybrid.errors import PrecisionError, QuantizedStatesError
from lightning_hybrid.params.guards import can_guard
from lightning_hybrid.params.shards import LocalShards
from lightning_hybrid.precision.hybrid import HybridPrecision
from lightning_hybrid.precision.message_dtypes import message_dtypes
from lightning_hybrid.replicate.buffers import ReplicaBufferBroadcast
from lightning_hybrid.run.build import RunOwner
from lightning_hybrid.run.connected import ConnectedOptimizers, Optimization
from lightning_hybrid.run.full_steps import read_in_manual_steps, shardings_in_step, step_full_parameters
from lightning_hybrid.run.in_backward import connect_steps_in_backward
from lightning_hybrid.run.run import Run
from lightning_hybrid.step.standins.tensors import is_absent
from lightning_hybrid.strategies.options.options import Options
from lightning_hybrid.strategies.user_code.hooks import (
    read_in_later_hooks,
    step_hooks,
    without_later_hooks,
)
from lightning_hybrid.strategies.world.callbacks import around_validation
from lightning_hybrid.techniques.adascale import (
    check_adascale,
    connect_adascale,
    has_adascale,
)
from lightning_hybrid.techniques.fused_adam import fuse_steps
from lightning_hybrid.techniques.reducers import Reducers, connect_gradients

if TYPE_CHECKING:
    from lightning_hybrid.params.reads.states import FullStates
    from lightning_hybrid.pipeline.stages.plan import StagePlan
    from lightning_hybrid.replicate.drift import CopiedParameters


def connect_optimizers(
    run: Run, owner: RunOwner, optimizers: Sequence[Optimizer], built_with: frozenset[int] | None = None
) -> Optimization:
    """Let optimizers, which hold the user's own Parameter objects, step local shards with reduced gradients.

    ``built_with`` are the numbers of the hooks on their steps that they were built with; None where they are new.
    """
    built_with = step_hooks(optimizers) if built_with is None else built_with
    with without_later_hooks(optimizers, built_with):
        made = _connect_optimizers(run, owner, optimizers)
    reads = [] if run.hook_reads is None or run.setting.is_manual else [run.hook_reads]
    for optimizer in optimizers if reads or run.setting.is_manual else ():
        run.until_end.callback(read_in_later_hooks(optimizer, built_with, reads, owner.state))
    return dataclasses.replace(made, step_hooks=built_with)


def _connect_optimizers(run: Run, owner: RunOwner, optimizers: Sequence[Optimizer]) -> Optimization:
    setting, undo = run.setting, run.until_end
    _check_optimizers(optimizers, run.plan)
    check_quantized_states(optimizers, setting.options, is_sharded=bool(run.parts))
    for technique in run.techniques:
        technique.check_optimizers(run, optimizers)
    reducers, tied, counted = connect_gradients(
        setting.module,
        run.plan,
        run.mesh,
        averages=not run.active.reduces_gradients or setting.is_manual,
        unreplicated=run.names_over("ep"),
        reduce_dtype=message_dtypes(setting.precision)["reduce_dtype"],
        sharded=run.parts.names,
    )
    for reducer in reducers.every:
        undo.callback(reducer.close)
    counted_parameters = [p for p in setting.module.parameters() if id(p) in counted]
    parts = _parts_of_norms(run)
    if parts:
        counted = {id(p) for p in counted_parameters if parts.is_first_owner(p)}
    _connect_precision(run, counted, parts)
    _step_in_float32(run, optimizers)
    full = step_full_parameters(run, owner, optimizers)
    watched = _watch_steps(run, owner, [optimizer for optimizer in optimizers if optimizer not in full])
    moved = [s for each in run.techniques for s in each.move_states(run, optimizers, [*watched, *full])]
    states: list[FullStates] = []
    if setting.is_manual:
        watched += _full_in_manual_steps(run, optimizers)
        states = _guard_manual_steps(run, [*watched, *full], optimizers)
    if has_adascale(setting.trainer):
        _connect_adascale(run, reducers, counted_parameters, counted)
    return Optimization(
        reducers=reducers,
        tied=tied,
        buffers=_broadcast_buffers(run),
        copied=tuple(_copied_parameters(run, optimizers)),
        moved=tuple(moved),
        states=tuple(states),
        watched=tuple(watched),
        in_backward=connect_steps_in_backward(run, optimizers, watched, moved, reducers),
        connected=ConnectedOptimizers(run, optimizers, reducers),
    )


def _parts_of_norms(run: Run) -> LocalShards:
    """Return what of each gradient this rank has when it is clipped, and which ranks count it."""
    if not run.setting.is_manual:
        return run.parts
    # Shards over replicas are gathered, so that each replica clips full gradients, but for those of experts.
    gathered = run.gathered_shardings if run.names_over("ep") else ()
    counted_once = [dataclasses.replace(sharding, placements={}) for sharding in gathered]
    return LocalShards(run.setting.module, [*shardings_in_step(run), *counted_once])


def _connect_precision(run: Run, counted: set[int], parts: LocalShards) -> None:
    """Let gradients be clipped by their norm over all ranks, which have these parts of them."""
    setting = run.setting
    if setting.shards_module or isinstance(setting.precision, HybridPrecision):
        axes = ("pp", "cp", "tp" if setting.is_manual and not run.names_over("ep") else "parts")
        slices = parts.first_owned_slices if parts else None
        clipping = run.guards.off if setting.is_manual and run.guards is not None else nullcontext
        precision = setting.mesh_precision
        precision.connect_mesh(run.mesh, lambda: counted, axes=axes, parts=slices, around_clipping=clipping)


def _step_in_float32(run: Run, optimizers: Sequence[Optimizer]) -> None:
    """Let optimizers step float32 copies of bfloat16 parameters, below all that shards or offloads their steps."""
    from lightning_hybrid.precision.stochastic_rounding import ParameterNames

    setting, precision = run.setting, run.setting.precision
    if not setting.steps_in_float32:
        return
    assert isinstance(precision, HybridPrecision)
    fuse_steps(optimizers, run.until_end)
    sharded = setting.is_manual and bool(run.gathered_shardings)
    check_random_rounding(precision, shards_manual_steps=sharded)
    undo = precision.step_in_float32(
        optimizers,
        ParameterNames(setting.module, optimizers),
        seed=setting.seed,
        step=lambda: setting.trainer.global_step,
        shardings=run.parts.shardings,
    )
    run.until_end.callback(undo)
    run.until_end.enter_context(precision.adding_gradients(setting.module.parameters()))


def _watch_steps(run: Run, owner: RunOwner, optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """Let optimizers that need full parameters step those; fuse the steps of the others; return the former."""
    setting, undo = run.setting, run.until_end
    watched = _read_full_parameters(run, owner, optimizers)
    check_reads_of_stages(setting.precision, watched if run.is_pipelined or setting.is_manual else [])
    fuse_steps([optimizer for optimizer in optimizers if optimizer not in watched], undo)
    mesh = setting.world.mesh
    for optimizer in optimizers if mesh.size("data") > 1 else ():
        if isinstance(optimizer, LBFGS):
            from lightning_hybrid.strategies.user_code.optimizers import search_by_mean_loss

            undo.callback(search_by_mean_loss(optimizer, mesh))
    return watched


def _read_full_parameters(run: Run, owner: RunOwner, optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """Let optimizers that need full parameters read those; return them."""
    setting, undo = run.setting, run.until_end
    if setting.is_manual:
        return read_in_manual_steps(run, owner, optimizers)
    if run.hook_reads is None:
        return []
    from lightning_hybrid.strategies.user_code.optimizers import reads_of_optimizers, watch_step

    watched = reads_of_optimizers(optimizers, run.hook_reads)
    for optimizer, reads in watched.items():
        undo.callback(watch_step(optimizer, reads, owner.state))
    return list(watched)


def _full_in_manual_steps(run: Run, optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """Let optimizers that the module calls itself step full or sharded parameters; return the former."""
    return [each for technique in run.techniques for each in technique.step_in_user_step(run, optimizers)]


def _guard_manual_steps(run: Run, full: Sequence[Optimizer], optimizers: Sequence[Optimizer]) -> list[FullStates]:
    """Let optimizers that the module calls itself see shards; return the states that are shards.

    Those of optimizers that step ``full`` parameters are full.
    """
    if run.guards is None:
        return []
    from lightning_hybrid.params.reads.agreement import HookAgreement
    from lightning_hybrid.params.reads.states import FullStates
    from lightning_hybrid.strategies.user_code.optimizers import step_local_shards

    meet = partial(run.setting.world.rendezvous, compares=False)
    agreement = HookAgreement(run.mesh.group("holders"), run.setting.device, meet, "layer's")
    found = []
    for optimizer in optimizers:  # outermost: no other replacement of a step is guarded
        is_sharded = run.parts and not any(optimizer is each for each in full)
        states = [FullStates(optimizer, run.parts, run.guards, agreement)] if is_sharded else []
        run.until_end.callback(step_local_shards(optimizer, run.guards, states))
        found += states
    return found


def _connect_adascale(
    run: Run, reducers: Reducers, counted_parameters: Sequence[nn.Parameter], counted: set[int]
) -> None:
    setting, parts = run.setting, run.parts
    mesh = setting.world.mesh
    check_adascale(setting.layout, parts)
    before = {id(p) for p in counted_parameters if parts.is_first_owner(p, within_replica=True)}
    if not run.is_pipelined and mesh.rank_in("pp"):  # all of them run full batches
        before = set()
    is_copy = bool(run.gathered_shardings) and run.mesh.rank_in("dp_replicate")
    if (runner := run.plain_runner) is not None:
        runner.run_full_batches()  # the gradients of shares are not those of batches
    connect_adascale(setting.trainer, mesh, (before, set() if is_copy else counted), reducers, run.active)


def _broadcast_buffers(run: Run) -> ReplicaBufferBroadcast | None:
    setting = run.setting
    if run.mesh.size("data") == 1:
        return None
    buffers = ReplicaBufferBroadcast(setting.module, run.mesh.group("data"), setting.device)
    run.until_end.callback(around_validation(setting.trainer, buffers.share, lambda: None))
    return buffers


def _copied_parameters(run: Run, optimizers: Sequence[Optimizer]) -> Iterator[CopiedParameters]:
    """Yield the parameters that tensor ranks, or context ranks, hold alike."""
    from lightning_hybrid.replicate.drift import CopiedParameters

    for axis in ("tp", "cp"):
        sharded = {name for each in run.parts.shardings if each.axis in (axis, "ep") for name in each.placements}
        named = run.setting.module.named_parameters()
        copies = {name: p for name, p in named if name not in sharded and not is_absent(p) and can_guard(p)}
        if copies and run.mesh.size(axis) > 1:
            yield CopiedParameters(copies, optimizers, run.mesh.group(axis), run.setting.device)


def _check_optimizers(optimizers: Sequence[Optimizer], plan: StagePlan | None) -> None:
    """Refuse optimizers that need parameters of several stages at once."""
    has_stages = plan is not None and plan.num_ranks > 1
    if has_stages and any(isinstance(optimizer, LBFGS) for optimizer in optimizers):
        raise ValueError(
            "LBFGS needs all parameters in one vector, but each rank holds its own stages, and configure_optimizers"
            " does not name it; build it there, so that ranks hold shards instead of stages"
        )


def check_random_rounding(precision: HybridPrecision, *, shards_manual_steps: bool) -> None:
    """Refuse stochastic rounding where a step does not know which elements of a parameter it has."""
    if precision.stochastic_rounding and shards_manual_steps:
        raise PrecisionError(
            "stochastic_rounding=True: zero_stage with manual optimization shards the steps of optimizers, which do not"
            " know the places of their elements; set zero_stage=0, or master_weights=True instead",
            entry="precision-rounding-places",
        )


def check_reads_of_stages(precision: object, watched: Sequence[Optimizer]) -> None:
    """Refuse steps in float32 of optimizers that may read parameters of other stages, which are bfloat16 there."""
    own = [optimizer for optimizer in watched if not type(optimizer).step.__module__.startswith("torch.")]
    if own and isinstance(precision, HybridPrecision) and precision.steps_in_float32:
        name = type(own[0]).__name__
        raise PrecisionError(
            f"{name} may combine parameters of several stages in its step, and those of other stages are bfloat16; set"
            " pipeline_parallel_size=1, or give its class the attribute steps_parameters_independently=True if it steps"
            " each by itself, or leave out master_weights and stochastic_rounding",
            entry="precision-optimizer",
        )


def check_quantized_states(optimizers: Sequence[Optimizer], options: Options, *, is_sharded: bool) -> None:
    """Refuse what does not go with quantized states."""
    for optimizer in optimizers:
        name, attributes = type(optimizer).__name__, vars(optimizer)
        if not is_sharded and not options.optimizer_in_backward:
            continue
        if attributes.get("is_paged"):
            raise QuantizedStatesError(
                f"{name} has paged states (is_paged=True), which are not gathered to the owners of sharded parameters;"
                " set is_paged=False",
                entry="quantized-paged",
            )
        overrides: Any = getattr(attributes.get("mng"), "index2config", None)
        if overrides:
            raise QuantizedStatesError(
                f"GlobalOptimManager overrides options of {len(overrides)} parameters of {name} by their positions in"
                " groups, but owners of sharded parameters step a few at a time; put these parameters into a group of"
                " their own, or into another optimizer",
                entry="quantized-overrides",
            )
