"""A run as data: its setting, which stays, and what a rank holds and runs under the layout that the run has now."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from lightning_hybrid.step.objects.modules import find_layers
from lightning_hybrid.step.standins.tensors import is_absent
from lightning_hybrid.techniques.actives import Actives
from lightning_hybrid.techniques.technique import Technique

if TYPE_CHECKING:
    from lightning_hybrid.graph.partition import Assignment
    from lightning_hybrid.memory.saved_activations.layer_activations import LayerActivations
    from lightning_hybrid.mesh import Mesh
    from lightning_hybrid.params.guards import ReadGuards
    from lightning_hybrid.params.reads.hooks import HookReads
    from lightning_hybrid.params.shards import AxisSharding, LocalShards
    from lightning_hybrid.pipeline.metrics import MetricSync
    from lightning_hybrid.pipeline.plain import PlainRunner
    from lightning_hybrid.pipeline.runner import MicrobatchRunner
    from lightning_hybrid.pipeline.staged import StepRunner
    from lightning_hybrid.pipeline.stages.plan import StagePlan, TraceVariant
    from lightning_hybrid.predict.ranks import Place
    from lightning_hybrid.randomness.keyed import KeyedRandomness
    from lightning_hybrid.run.setting import Setting
    from lightning_hybrid.strategies.state.layout_changes import Fallback
    from lightning_hybrid.tensor.runtime.model import ShardedModel


Kind = TypeVar("Kind", bound=Technique)


@dataclasses.dataclass(frozen=True)
class RecordedBatch:
    """The batch of one replica with which the first training step was recorded."""

    samples: int | None  # their number; None if unknown
    num_microbatches: int  # the number of microbatches that it is split into


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """State of this rank under one layout: its shards, and what runs, gathers and compiles them.

    Attributes:
        setting: Of the run.
        randomness: Keys random numbers of steps.
        mesh: The ranks that parameters are sharded over; wider than the world's where pipeline ranks hold shards.
        parts: The local shards of parameters.
        fallback: Why ranks hold shards in place of stages, if they do.
        plan: The stages and their parameters; None without a runner.
        runner: Runs steps in microbatches; None where the user's steps run unchanged.
        metrics: Synchronizes torchmetrics of the module; None without a runner.
        batch: With which the training step was recorded; None if it was not.
        techniques: What it uses besides stages, from the outermost around a layer to the innermost.
        active: What these do while steps run.
        hook_reads: Reads of full parameters in user hooks, if the module is sharded.
        until_end: Closed at the end of the layout: restores the user's objects.
    """

    setting: Setting
    randomness: KeyedRandomness
    mesh: Mesh
    parts: LocalShards
    fallback: Fallback | None = None
    plan: StagePlan | None = None
    runner: MicrobatchRunner | None = None
    metrics: MetricSync | None = None
    batch: RecordedBatch | None = None
    techniques: tuple[Technique, ...] = ()
    active: Actives = dataclasses.field(default_factory=Actives)
    hook_reads: HookReads | None = None
    until_end: contextlib.ExitStack

    @property
    def is_pipelined(self) -> bool:
        """Whether steps run in several stages."""
        return self.setting.layout.pipeline_parallel_size > 1 and self.fallback is None

    @property
    def is_sharded(self) -> bool:
        """Whether ranks hold shards of parameters, or only some of them."""
        return bool(self.parts) or self.is_pipelined

    @property
    def partitioned(self) -> StagePlan | None:
        """The plan, if the module is partitioned by it."""
        return self.plan if self.plan is not None and self.plan.is_partitioned else None

    @property
    def recorded(self) -> TraceVariant | None:
        """The first recording of the step; None where there is none."""
        return None if self.plan is None else self.plan.first

    @property
    def runs_user_step(self) -> bool:
        """Whether training steps are the user's own, which calls backwards or leaves them to Lightning."""
        return self.runner is None or self.setting.is_manual

    def count(self, batch: Any) -> int:
        """The number of microbatches of a training step on a batch."""
        return 1 if self.runner is None else self.runner.count("training_step", batch)

    @property
    def assignment(self) -> Assignment | None:
        """The recorded step in stages; None where steps run in none."""
        return self.recorded.assignment if self.is_pipelined and self.recorded is not None else None

    @property
    def plain_runner(self) -> PlainRunner | None:
        """The runner of steps without stages; None where they are replayed from a recording."""
        if self.runner is None:
            return None
        from lightning_hybrid.pipeline.plain import PlainRunner

        return self.runner if isinstance(self.runner, PlainRunner) else None

    @property
    def staged_runner(self) -> StepRunner | None:
        """The runner that replays steps from a recording; None where there is none."""
        if self.runner is None:
            return None
        from lightning_hybrid.pipeline.staged import StepRunner

        return self.runner if isinstance(self.runner, StepRunner) else None

    @property
    def guards(self) -> ReadGuards | None:
        """Guards that gather on read in steps without a recording."""
        return None if self.plain_runner is None else self.plain_runner.guards

    @property
    def gathered_shardings(self) -> list[AxisSharding]:
        """The shardings of parameters that are gathered for a step."""
        return [sharding for technique in self.techniques for sharding in technique.shardings]

    def technique(self, kind: type[Kind]) -> Kind | None:
        """Return the technique of a class, if this run uses it."""
        return next((each for each in self.techniques if isinstance(each, kind)), None)

    @property
    def shards(self) -> ShardedModel | None:
        """How tensor and context ranks shard each layer, if they do."""
        return next((each.shards for each in self.techniques if each.shards is not None), None)

    @property
    def activations(self) -> LayerActivations | None:
        """What stores tensors that layers save for the backward, if they are offloaded or compressed."""
        return next((each.storing for each in self.techniques if each.storing is not None), None)

    @property
    def places(self) -> dict[str, Place]:
        """Which of "parameters", "gradients" and "optimizer_states" are outside of the compute device."""
        return {what: place for technique in self.techniques for what, place in technique.places(self).items()}

    @property
    def plans(self) -> Mapping[str, Any]:
        """How layers are sharded, by FQN."""
        return {fqn: plan for technique in self.techniques for fqn, plan in technique.plans.items()}

    @property
    def policies(self) -> Mapping[str, Any]:
        """What layers save for the backward, by FQN; everything where it is not named."""
        return {fqn: policy for technique in self.techniques for fqn, policy in technique.policies.items()}

    def local_layers(self) -> dict[str, nn.Module]:
        """Return the layers of this rank's stages, by FQN: the largest modules that repeat, and those beside them."""
        units = dict(self.setting.module.named_children())
        if self.is_pipelined and self.recorded is not None:
            units = dict(self.recorded.recording.units)
        layers = find_layers(units).items()
        return {fqn: layer for fqn, layer in layers if not any(map(is_absent, layer.parameters()))}

    def names_over(self, axis: str) -> set[str]:
        """Return the FQNs of parameters that are sharded over an axis of the mesh."""
        return {name for sharding in self.parts.shardings if sharding.axis == axis for name in sharding.placements}

    def context(self, name: str) -> Any:
        """Return the factory of the context around one run of the step ``name``."""
        # Where a runner runs the layers, it enters these itself.
        layers, has_runner = self.active.of_steps, self.runner is not None
        around = () if has_runner else (layers.running, layers.around_step)
        return self.setting.contexts.of(name, delays_calls=has_runner, around_layers=around)

    def gathered(self, num_microbatches: int = 1) -> AbstractContextManager[Any]:
        """Gather parameters inside, for a step with that many backwards per stage."""
        return self.active.step(num_microbatches)

    # -- facts for a comparison with one process ---------------------------------------------------------------------

    @property
    def unpartitioned_steps(self) -> frozenset[str]:
        """Names of evaluation steps that every rank has run unpartitioned so far."""
        if self.plain_runner is not None:
            return frozenset({"validation_step", "test_step", "predict_step"})
        return frozenset() if self.runner is None else frozenset(self.runner.unpartitioned.names)

    @property
    def batch_shares(self) -> int:
        """Ranks that hold shards where they cannot hold stages, and run steps on shares of a replica's batch."""
        return 1 if self.fallback is None else self.mesh.size("shares")

    @property
    def shared_last_batch(self) -> bool:
        """Whether these ranks ran the last training step on shares of its batch."""
        return self.plain_runner is not None and self.plain_runner.shared_last_batch

    @property
    def unsplit_step_names(self) -> frozenset[str]:
        """Names of steps whose batches are not split into microbatches, so far."""
        return frozenset() if self.runner is None else self.runner.unsplit_step_names

    @property
    def declared(self) -> dict[str, str]:
        """Warnings about numbers of microbatches that the batch does not have, by logged name or metric."""
        return {} if self.runner is None else self.runner.declared

    def close(self) -> Run:
        """Undo the changes to the user's objects; return the run with the attributes that outlive it."""
        self.until_end.close()
        return dataclasses.replace(
            self,
            active=Actives(),
            metrics=None,
            hook_reads=None,
        )
