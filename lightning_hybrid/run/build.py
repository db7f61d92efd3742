"""The construction of a run, in order: record and partition, drop other stages, shard, connect layers and hooks."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from lightning.pytorch.callbacks import ModelSummary
from torch import nn

from lightning_hybrid.params.gradient_hooks import on_full_gradient
from lightning_hybrid.params.shards import LocalShards
from lightning_hybrid.randomness.keyed import KeyedRandomness
from lightning_hybrid.run.connected import Optimization
from lightning_hybrid.run.module_state import FullOrShardedState
from lightning_hybrid.run.run import Run
from lightning_hybrid.run.setting import Setting
from lightning_hybrid.strategies.world.callbacks import FullAtTrainEnd, around_validation
from lightning_hybrid.strategies.world.evaluation import have_equal_batches
from lightning_hybrid.techniques.actives import Actives
from lightning_hybrid.techniques.order import techniques_of
from lightning_hybrid.techniques.technique import Active

if TYPE_CHECKING:
    from lightning_hybrid.params.reads.hooks import HookReads
    from lightning_hybrid.pipeline.stages.plan import StagePlan
    from lightning_hybrid.run.partition import ModulePartition
    from lightning_hybrid.strategies.options.options import Options


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

    def use_options(self, options: Options) -> None:
        """Run under other options from the next layout on."""

    def make_full(self) -> None:
        """Gather the full module on every rank."""

    def change_layout(self, arguments: Sequence[Any], refusal: str, *, may_retry: bool) -> bool:
        """Build the run again between two steps, as ``build_run``; return ``may_retry`` as it is now; collective."""


class OwnedByRun:
    """A part of the execution of a run, which reads the present run of its owner."""

    def __init__(self, owner: RunOwner) -> None:
        self._owner = owner

    @property
    def run(self) -> Run:
        """The present run."""
        return self._owner.run

    @property
    def optimization(self) -> Optimization:
        """Its reducers and optimizers."""
        return self._owner.optimization

    @property
    def setting(self) -> Setting:
        """Its setting."""
        return self._owner.setting


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

    ``may_retry`` says that a training batch may still show that the step can be partitioned after all; ``refusal`` says
    why it cannot be, where all ranks know that. ``arguments`` are of the training step that comes next.

    Returns:
        The run; the decisions on it, if there were any; whether all initial values were assigned.
    """
    randomness = KeyedRandomness(setting.seed, setting.device)
    run = Run(
        setting=setting,
        mesh=setting.world.mesh,
        parts=LocalShards(setting.module, ()),
        randomness=randomness,
        until_end=contextlib.ExitStack(),
    )
    partition: ModulePartition | None = None
    with _closed_on_error(run):
        if setting.needs_runner:
            from lightning_hybrid.run.partition import ModulePartition

            partition = ModulePartition(run, may_retry=may_retry)
            run = _drop_other_stages(partition.decide(arguments, refusal), owner)
        else:
            run = decide_without_runner(run)
        drop_plan = None if owner.state.is_full else run.plan
        is_filled = fills_empty and setting.empty is not None and setting.empty.fill(drop_plan)
        run.parts.shard_parameters(setting.module)
        run = _build_techniques(run, owner)
        setting.averages.follow(setting.module, drop_plan, run.parts, owner)
    return run, partition, is_filled


def decide_without_runner(run: Run) -> Run:
    """Decide what techniques do where the user's steps run unchanged."""
    run = dataclasses.replace(run, techniques=techniques_of(run))
    for technique in run.techniques:
        technique.decide(run)
    return run


def _build_techniques(run: Run, owner: RunOwner) -> Run:
    """Connect techniques to local shards, the innermost first, and let the runner execute layers as they do."""
    setting, built = run.setting, list[Active]()
    for technique in reversed(run.techniques):
        built.insert(0, technique.build(run, owner))
        run = dataclasses.replace(run, active=Actives(built))
    active, runner = run.active, run.runner
    if run.parts:
        loop = setting.trainer.fit_loop.epoch_loop.val_loop

        def begin() -> None:
            active.begin_evaluation(have_equal_batches(loop))

        run.until_end.callback(around_validation(setting.trainer, begin, active.end_evaluation))
    if runner is None:
        return run
    if run.parts:
        parts, names = run.parts, {id(parameter): name for name, parameter in setting.module.named_parameters()}
        runner.guards.hook_gradients_by(
            lambda parameter, registration, hook: on_full_gradient(registration, parts, names[id(parameter)], hook)
        )
    runner.connect(active)
    # A parameter that was stepped in the backward has no old value.
    is_final = setting.options.verify_first_step or setting.options.optimizer_in_backward
    if (staged := run.staged_runner) is not None and setting.is_fitting and active.can_roll_back and not is_final:
        staged.roll_back_broken_steps(partial(run.mesh.all_reduce, axis="data"))
    return run


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
    hook_reads = _connect_hooks(run, owner, plan)
    if setting.is_fitting:
        run.until_end.callback(FullAtTrainEnd(owner).enter(setting.trainer))
    return dataclasses.replace(run, hook_reads=hook_reads)


def _connect_hooks(run: Run, owner: RunOwner, plan: StagePlan) -> HookReads:
    """Let hooks of the user read gradients and parameters of all stages."""
    from lightning_hybrid.params.reads.agreement import HookAgreement
    from lightning_hybrid.params.reads.conversions import skip_absent_parameters
    from lightning_hybrid.params.reads.gather import Stages
    from lightning_hybrid.params.reads.hooks import HookReads
    from lightning_hybrid.pipeline.stages.plan import buffer_owners
    from lightning_hybrid.strategies.user_code.checkpoint_hooks import CheckpointHooks
    from lightning_hybrid.strategies.user_code.loaders import wrap_loaders
    from lightning_hybrid.strategies.user_code.watched import HookWatch, summarize_full_parameters

    setting, undo = run.setting, run.until_end
    trainer, module = setting.trainer, setting.module
    parameters = dict(module.named_parameters())
    stages, stage_ranks, meet = None, None, partial(setting.world.rendezvous, compares=False)
    if plan.num_ranks > 1:
        undo.callback(skip_absent_parameters(module))
        stages = Stages(plan.ranks_of, setting.world.mesh.group("pp"), setting.device)
        stage_ranks = HookAgreement(stages.group, setting.device, meet)
    reads = HookReads(
        parameters,
        run.parts,
        HookAgreement(run.mesh.group("holders"), setting.device, meet, "layer's"),
        stages,
        stage_ranks,
        partial(buffer_owners, plan),
        over_replicas=bool(run.gathered_shardings or run.names_over("ep")),
    )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ModelSummary):
            undo.callback(summarize_full_parameters(callback, reads))
    assert run.runner is not None
    undo.callback(wrap_loaders(owner, run.runner.unpartitioned))
    watch = HookWatch(trainer, owner, reads)
    undo.callback(watch.wrap())
    undo.callback(CheckpointHooks(watch, reads).wrap())
    return reads
