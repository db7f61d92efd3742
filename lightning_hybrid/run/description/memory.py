"""The estimated memory of each stage of a run, from its plan: also of stages whose parameters are on other ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid.graph.partition import Assignment
from lightning_hybrid.optimizers.trial import StateSizes
from lightning_hybrid.params.boxes import shard_of
from lightning_hybrid.params.shards import AxisSharding, LocalShards
from lightning_hybrid.predict.ranks import (
    ParameterOnRank,
    RankMemory,
    activation_bytes,
    estimate_rank_memory,
    message_bytes,
    working_bytes,
)
from lightning_hybrid.run.run import Run
from lightning_hybrid.schedule.in_flight import in_flight_at_peak
from lightning_hybrid.step.objects.modules import find_layers
from lightning_hybrid.step.recording.units import choose_units
from lightning_hybrid.step.standins.tensors import full_shape
from lightning_hybrid.strategies.user_code.hooks import old_gradients_are_read
from lightning_hybrid.techniques.actives import Actives

_OVER_REPLICAS = ("dp_shard", "ep_shard")


def memory_of_stages(
    run: Run, optimizers: Sequence[Optimizer], num_microbatches: int, recorded: Assignment | None = None
) -> list[RankMemory]:
    """Estimate the memory of each stage on the rank that holds it; one estimate for all where there are no stages.

    ``recorded`` is the step whose activations are counted, in place of that of the run's stages.
    """
    setting, stages = run.setting, _Stages(run)
    sizes = [StateSizes(optimizer, **setting.sizes_of_states) for optimizer in optimizers]
    members: list[list[ParameterOnRank]] = [[] for _ in range(stages.count)]
    parameters = dict(setting.module.named_parameters())
    layers = stages.layer_of(parameters)
    for name, parameter in parameters.items():
        here = ParameterOnRank(
            nbytes=_nbytes(parameter, stages.shape(name, parameter)),
            shard_bytes=_nbytes(parameter, stages.shape(name, parameter, sharded=True)),
            state_bytes=_state_bytes(sizes, parameter, stages.shape(name, parameter, sharded=True)),
            is_trained=parameter.requires_grad,
            layer=layers.get(name, ""),
        )
        for stage in stages.first_on_each_rank(name):
            members[stage].append(here)
    return [
        estimate_rank_memory(
            of_stage,
            activations,
            working=work + _of_optimizer_and_hooks(of_stage, run),
            messages=exchanged + _of_gradient_messages(of_stage, run),
            footprint=next(
                (footprint for each in run.techniques if (footprint := each.footprint(run, of_stage)) is not None), None
            ),
            places=run.places,
        )
        for of_stage, activations, work, exchanged in zip(
            members,
            _activations(run, num_microbatches, recorded or run.assignment, stages.count),
            _working(run, stages.count),
            _exchanged(run, stages.count),
            strict=True,
        )
    ]


def _of_optimizer_and_hooks(members: Sequence[ParameterOnRank], run: Run) -> int:
    """Bytes of a new gradient beside the sum, of an optimizer's step, and of gradients that are copied."""
    if not run.is_pipelined:  # without a recorded step no bound is given
        return 0
    trained = [each for each in members if each.is_trained]
    footprint = sum(each.shard_bytes for each in trained) if old_gradients_are_read(run.setting.trainer) else 0
    if run.setting.trainer.accumulate_grad_batches > 1:  # copies of those of earlier batches, for a rollback
        footprint = sum(each.nbytes for each in trained)
    return footprint + 3 * max((each.nbytes for each in trained), default=0)


def _of_gradient_messages(members: Sequence[ParameterOnRank], run: Run) -> int:
    """Bytes of averages of gradients over replicas, which go all at once."""
    is_averaged = run.is_pipelined and run.setting.layout.data_parallel_size > 1
    if not is_averaged or any(each.gathers_per_layer(run) for each in run.techniques):
        return 0
    return sum(each.nbytes for each in members if each.is_trained)


def without_techniques(run: Run) -> Run:
    """Return a plan of the run without ZeRO, offload and recomputation, for estimates of its memory only."""
    shardings = [each for each in run.parts.shardings if each.axis not in _OVER_REPLICAS]
    parts = LocalShards(run.setting.module, shardings)
    return dataclasses.replace(run, parts=parts, techniques=(), active=Actives())


def memory_of_ranks(stages: Sequence[RankMemory], run: Run) -> list[RankMemory]:
    """Return the memory of each pipeline rank of a run, from the memory of its stages."""
    if not run.is_pipelined or run.plan is None:
        return list(stages[:1])
    ranks = list(stages[: run.plan.num_ranks])  # in every placement rank r has stage r, and further ones
    for number, stage in enumerate(stages[run.plan.num_ranks :], start=run.plan.num_ranks):
        ranks[run.plan.rank_of(number)] += stage
    return ranks


class _Stages:
    """Which stages hold a parameter, and which shard of it the first rank of each axis has."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._plan = run.plan if run.is_pipelined and run.plan is not None and run.plan.is_partitioned else None
        self.count = 1 if self._plan is None else self._plan.num_stages
        shardings: Sequence[AxisSharding] = run.parts.shardings
        self._shardings = shardings
        self._before_zero = [sharding for sharding in shardings if sharding.axis not in _OVER_REPLICAS]

    def of(self, name: str) -> tuple[int, ...]:
        return (0,) if self._plan is None else self._plan.stages_of(name)

    def first_on_each_rank(self, name: str) -> Iterable[int]:
        """The stages that hold a parameter; only the first one of each rank, whose stages share it."""
        stages = self.of(name)
        return stages if self._plan is None else {self._plan.rank_of(stage): stage for stage in stages[::-1]}.values()

    def shape(self, name: str, parameter: Tensor, *, sharded: bool = False) -> tuple[int, ...]:
        shardings = self._shardings if sharded else self._before_zero
        return shard_of(shardings, name, full_shape(parameter)).shape

    def layer_of(self, names: Iterable[str]) -> Mapping[str, str]:
        """The layer that a parameter belongs to, by the parameter's FQN."""
        if not self._run.gathered_shardings:
            return {}
        first = None if self._plan is None else self._plan.first
        units = choose_units(self._run.setting.module, 1) if first is None else first.recording.units
        layers = find_layers(units)
        found = {name: [fqn for fqn in layers if name.startswith(f"{fqn}.")] for name in names}
        return {name: fqns[0] for name, fqns in found.items() if fqns}


def _nbytes(parameter: nn.Parameter, shape: Sequence[int]) -> int:
    return torch.Size(shape).numel() * parameter.element_size()


def _state_bytes(sizes: Sequence[StateSizes], parameter: Tensor, shape: Sequence[int]) -> int | None:
    known = [each.nbytes(parameter, shape) for each in sizes if each.steps(parameter)]
    return None if None in known else sum(size for size in known if size is not None)


def _activations(
    run: Run, num_microbatches: int, assignment: Assignment | None, num_stages: int
) -> Sequence[int | None]:
    """Bytes saved for backward by the microbatches in flight, of each stage; None where no step is recorded."""
    if assignment is None:
        return [None] * num_stages
    saved = activation_bytes(assignment, run.policies)
    if run.plan is None or not run.is_pipelined:
        return saved
    in_flight = in_flight_at_peak(run.plan.training_schedule(num_microbatches), saved)
    return [each * count for each, count in zip(saved, in_flight, strict=True)]


def _working(run: Run, num_stages: int) -> Sequence[int]:
    """Bytes of the layer that runs, of each stage, of the batch and of its copy; 0 where no step is recorded."""
    if run.assignment is None:
        return [0] * num_stages
    # With its copy in the snapshot before a step.
    batch = 0 if run.runner is None else 2 * run.runner.batch_bytes.get("training_step", 0)
    return [each + batch for each in working_bytes(run.assignment, run.policies)]


def _exchanged(run: Run, num_stages: int) -> Sequence[int]:
    """Bytes of messages between stages, of each of them; 0 where no step is recorded."""
    return [0] * num_stages if run.assignment is None else message_bytes(run.assignment)
