"""The estimated memory of each stage of a run, from its plan: also of stages whose parameters are on other ranks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid.graph.partition import Assignment
from lightning_hybrid.optimizers.trial import StateSizes
from lightning_hybrid.params.boxes import shard_of
from lightning_hybrid.params.shards import LocalShards
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
            gradient_size=setting.dtype_of_gradient(parameter).itemsize // parameter.dtype.itemsize,
        )
        for stage in stages.first_on_each_rank(name):
            members[stage].append(here)
    of_step = _of_step(run, num_microbatches, recorded or run.assignment, stages.count)
    return [_of_stage(run, held, *sizes) for held, sizes in zip(members, of_step, strict=True)]


def _of_stage(
    run: Run, members: Sequence[ParameterOnRank], activations: int | None, working: int, messages: int
) -> RankMemory:
    """Return the memory of one stage; without a recorded step no bound is given of the optimizer and of averages."""
    setting, trained = run.setting, [each for each in members if each.is_trained]
    gradients = sum(each.gradient_bytes for each in trained)
    if run.is_pipelined:
        if setting.trainer.accumulate_grad_batches > 1:
            working += gradients  # copies of the gradients of earlier batches, for a rollback
        elif old_gradients_are_read(setting.trainer):
            working += sum(each.gradient_shard_bytes for each in trained)
        # A new gradient beside the sum, and the optimizer's step.
        working += 3 * max((each.gradient_bytes for each in trained), default=0)
        if run.setting.layout.data_parallel_size > 1 and not any(
            each.gathers_per_layer(run) for each in run.techniques
        ):
            messages += gradients  # averages over replicas, which go all at once
    found = (technique.footprint(run, members) for technique in run.techniques)
    footprint = next((each for each in found if each is not None), None)
    return estimate_rank_memory(
        members, activations, working=working, messages=messages, footprint=footprint, places=run.places
    )


def _of_step(
    run: Run, num_microbatches: int, recorded: Assignment | None, num_stages: int
) -> Iterable[tuple[int | None, int, int]]:
    """Return of each stage the bytes of activations in flight, of the layer that runs and the batch, and of messages.

    Without a recorded step the first are unknown, and the others 0.
    """
    activations: Sequence[int | None] = [None] * num_stages
    if recorded is not None:
        activations = saved = activation_bytes(recorded, run.policies)
        if run.plan is not None and run.is_pipelined:
            in_flight = in_flight_at_peak(run.plan.training_schedule(num_microbatches), saved)
            activations = [each * count for each, count in zip(saved, in_flight, strict=True)]
    working = messages = [0] * num_stages
    if run.assignment is not None:
        # With its copy in the snapshot before a step.
        batch = 0 if run.runner is None else 2 * run.runner.batch_bytes.get("training_step", 0)
        working = [each + batch for each in working_bytes(run.assignment, run.policies)]
        messages = message_bytes(run.assignment)
    share = math.prod(each.activation_share(run) for each in run.techniques)
    here = [None if each is None else math.ceil(share * each) for each in activations]
    return zip(here, [math.ceil(share * each) for each in working], messages, strict=True)


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
        self._shardings = run.parts.shardings
        self._before_zero = [each for each in self._shardings if each.axis not in _OVER_REPLICAS]

    def first_on_each_rank(self, name: str) -> Iterable[int]:
        """The stages that hold a parameter; only the first one of each rank, whose stages share it."""
        if self._plan is None:
            return (0,)
        return {self._plan.rank_of(stage): stage for stage in self._plan.stages_of(name)[::-1]}.values()

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
