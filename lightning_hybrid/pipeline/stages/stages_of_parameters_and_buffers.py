"""The stage plan: the pipeline stages, and so the ranks, that own each parameter and buffer of a module.

The first recorded training step decides the partition. Further recordings (other shapes, validation) are assigned to
the same owner stages.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.errors import WITHOUT_STAGES, StepError
from lightning_hybrid.graph import partition
from lightning_hybrid.graph.partition import Assignment
from lightning_hybrid.graph.step_graph import Node
from lightning_hybrid.pipeline.stages.recording_partitioned_into_stages import TraceVariant
from lightning_hybrid.randomness.keyed import KeyedRandomness
from lightning_hybrid.schedule import (
    Schedule,
    StageCosts,
    forward_only,
    make_schedule,
    placement_of,
    rank_of_stage,
    stages_of_rank,
)
from lightning_hybrid.step.objects.modules import modules_in, parameters_of
from lightning_hybrid.step.recording.units import UnitChoice
from lightning_hybrid.step.tracing.recording import Recording


class StagePlan:
    """The partition of one module into stages.

    Attributes:
        owner_stages: The stage of each parameter and tracked buffer, by FQN; empty before the partition.
        first: The first trace, which has decided the partition.
        unit_choice: The choice of units of the next recording.
        units: The modules that are one node each in the latest recording, by FQN.
        tracked_buffers: FQNs of the buffers that have owners as parameters do.
        placement: Which rank holds which stage.
        stage_costs: Costs of a forward of each stage, as the first rank estimated them; empty before the partition.
        on_all_stages: FQNs of parameters that a step with guards has not read so far, and may read on any stage.
    """

    def __init__(
        self,
        root: nn.Module,
        group: dist.ProcessGroup,
        randomness: KeyedRandomness,
        *,
        schedule: str = "1f1b",
        stages_per_rank: int = 1,
        max_microbatches_in_flight: int | None = None,
        cuts: Sequence[str] | None = None,
        shares_experts: bool = False,
        agree: Callable[[Any], Any] = lambda decision: decision,
        first_failure: Callable[[Exception | None], tuple[int, str] | None] = lambda error: None,
    ) -> None:
        """Plan the stages of a module.

        Args:
            root: The user's module.
            group: The ranks of this pipeline.
            randomness: Keys the random numbers of recorded steps.
            schedule: Name of the training schedule, which decides the rank of each stage.
            stages_per_rank: Number of stages of each rank.
            max_microbatches_in_flight: Limit for a schedule that is searched.
            cuts: FQNs of the first unit of each stage but the first; balanced if None.
            shares_experts: Whether ranks share experts, lists of which are then on one stage.
            agree: Returns the first rank's argument on every rank; replicas must have the same partition.
            first_failure: Returns the first rank that has an error, and that error, on every rank; None without any.
        """
        self.num_ranks, self.rank, self.stages_per_rank = group.size(), group.rank(), stages_per_rank
        self.num_stages = self.num_ranks * stages_per_rank
        self._schedule, self._max_in_flight = schedule, max_microbatches_in_flight
        self.placement = placement_of(schedule, stages_per_rank)
        self.stage_costs: list[float] = []
        self.owner_stages: dict[str, int] = {}
        self.first: TraceVariant | None = None
        self.root, self.group, self.randomness = root, group, randomness
        self.cuts, self.agree, self.first_failure = cuts, agree, first_failure
        self.unit_choice = UnitChoice(root, self.num_stages, shares_experts=shares_experts)
        self.units: Mapping[str, nn.Module] = {}
        self.tracked_buffers, self.on_all_stages = set[str](), set[str]()

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages of this rank."""
        return stages_of_rank(self.rank, self.num_ranks, self.stages_per_rank, self.placement)

    def rank_of(self, stage: int) -> int:
        """The pipeline rank that holds a stage."""
        return rank_of_stage(stage, self.num_ranks, self.placement)

    def training_schedule(self, num_microbatches: int) -> Schedule:
        """The schedule of a training step."""
        costs = StageCosts(tuple(self.stage_costs), tuple(2 * cost for cost in self.stage_costs))
        return make_schedule(
            self._schedule,
            self.num_ranks,
            num_microbatches,
            self.stages_per_rank,
            max_in_flight=self._max_in_flight,
            costs=costs if self.stage_costs else None,
        )

    def evaluation_schedule(self, num_microbatches: int) -> Schedule:
        """The schedule of a step without backward."""
        return forward_only(self.num_ranks, num_microbatches, self.stages_per_rank, self.placement)

    def ranks_of(self, fqn: str) -> tuple[int, ...]:
        """Pipeline ranks that own a parameter or tracked buffer; the first one counts it."""
        return tuple(dict.fromkeys(map(self.rank_of, self.stages_of(fqn))))

    def stages_of(self, fqn: str) -> tuple[int, ...]:
        """Stages that own a parameter or tracked buffer."""
        if fqn in self.on_all_stages:
            return tuple(range(self.num_stages))
        owner = (self.owner_stages[fqn],)
        return owner if self.first is None else self.first.assignment.holders.get(fqn, owner)

    @property
    def is_partitioned(self) -> bool:
        """Whether each parameter has an owner stage."""
        return bool(self.owner_stages)

    def partition_by_size(self) -> None:
        """Give each rank parameters of equally many bytes, where no step can be partitioned."""
        sizes = {name: p.numel() * p.element_size() for name, p in self.root.named_parameters()}
        self.owner_stages, before, total = {}, 0, max(1, sum(sizes.values()))
        for name, size in sizes.items():  # the stage in which its middle is
            self.owner_stages[name] = min(self.num_stages - 1, self.num_stages * (2 * before + size) // (2 * total))
            before += size
        self.tracked_buffers, self.on_all_stages = set(), set()

    def names(self) -> dict[int, str]:
        """FQN by id of every parameter and tracked buffer."""
        names = {id(parameter): name for name, parameter in parameters_of(modules_in(self.root))}
        if self.tracked_buffers:
            buffers = self.root.named_buffers()
            names.update((id(buffer), name) for name, buffer in buffers if name in self.tracked_buffers)
        return names

    def modes(self) -> Hashable:
        """The state that a recording depends on beside the batch: train or eval, and requires_grad, of all modules."""
        modules = modules_in(self.root)
        trained = tuple([parameter.requires_grad for _, parameter in parameters_of(modules)])
        return tuple([module.training for _, module in modules]), trained

    def _add_owners(self, recording: Recording) -> None:
        """Assign parameters that no recorded step has read to the stage of neighbours, and buffers to their unit's.

        Buffers of the glue that the first step did not use are on the stage that computes the values written into them.
        """
        previous = 0
        parameters = {id(parameter): name for name, parameter in self.root.named_parameters()}
        buffers = {id(buffer): name for name, buffer in self.root.named_buffers()}
        inside = {id(buffer): stage for buffer, stage in self.unit_buffers()}
        new: list[str] = []
        for module in self.root.modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    previous = self.owner_stages.setdefault(parameters[id(parameter)], previous)
            for buffer in module._buffers.values():
                if buffer is not None and (name := buffers[id(buffer)]) in recording.graph.parameter_bytes:
                    new += [name] if name not in self.owner_stages and id(buffer) not in inside else []
                    self.owner_stages.setdefault(name, inside.get(id(buffer), previous))
        if new and self.first is not None:  # buffers of this step only, such as counts of validation
            self.owner_stages |= partition.buffer_stages(recording.graph, self.owner_stages, new, self.num_stages)

    def assign(self, recording: Recording) -> Assignment:
        """Assign a recording to stages, by the owners of its parameters.

        Raises:
            StepError: It uses parameters on other stages than the first one.
        """
        self._add_owners(recording)
        assignment = partition.assign(recording.graph, self.owner_stages, self.num_stages)
        if self.first is None:
            return assignment
        shared = [n for node in recording.graph.nodes for n in node.written if n in self.on_all_stages]
        if shared:
            raise StepError(
                f"{recording.graph.step} writes {shared[0]!r} in some batches only, and did not when it was first"
                " recorded, so that each pipeline rank holds a copy of it; write it in every batch, or in"
                " on_train_batch_end",
                entry="parameter-writes",
            )
        check_parameter_owners(assignment, self.owner_stages, self.rank_of, self.ranks_of)
        return assignment

    def unit_buffers(self) -> list[tuple[Tensor, int]]:
        """The buffers inside units, of any shape, and the stage on which the first step runs these."""
        if self.first is None:
            return []
        units, stages = self.first.recording.units, self.first.unit_stages.items()
        pairs = [(buffer, stage) for fqn, stage in stages for buffer in units[fqn].buffers()]
        return list({id(buffer): (buffer, stage) for buffer, stage in reversed(pairs)}.values())[::-1]


def check_parameter_owners(
    assignment: Assignment,
    owner_stages: Mapping[str, int],
    rank_of: Callable[[int], int],
    ranks_of: Callable[[str], tuple[int, ...]],
) -> None:
    """Refuse a step that reads a parameter on ranks that do not own it.

    Args:
        assignment: Assignment of a step that was recorded after the first one.
        owner_stages: Owner stage of each parameter, as the first step decided.
        rank_of: Returns the rank of a stage.
        ranks_of: Returns the owner ranks of a parameter.

    Raises:
        StepError: The step reads such a parameter; names it, and the parameter or buffer before it.
    """
    graph = assignment.graph
    for node, stage in zip(graph.nodes, assignment.node_stage, strict=True):
        for name in node.parameters:
            if name in assignment.sinks or rank_of(stage) in ranks_of(name):
                continue
            earlier = _colocated_source(assignment, owner_stages, node)
            if earlier is None:
                place, other = f"on stage {stage}", ""
            else:
                written = ", where that step writes it" if earlier in graph.buffers else ""
                place, other = f"after {earlier!r}", f" and {earlier!r} on stage {stage}{written}"
            raise StepError(
                f"{node.line or graph.step}: {graph.step} uses {name!r} {place}, but the first training step put it on"
                f" pipeline ranks {list(ranks_of(name))}{other}; use both in the same order in every step and batch,"
                f" or {WITHOUT_STAGES}",
                entry="parameter-order",
            )


def _colocated_source(assignment: Assignment, owner_stages: Mapping[str, int], node: Node) -> str | None:
    """A parameter or buffer on the stage of a node, from which an input of the node was computed there."""
    graph, stage = assignment.graph, assignment.node_stage[node.index]
    maker = {value: other for other in reversed(graph.nodes) for value in other.outputs}
    visited, waiting = {node.index}, [node]
    while waiting:
        current = waiting.pop()
        for name in current.parameters:
            if owner_stages.get(name) == stage:
                return name
        for value in (*current.inputs, *current.reads):
            before = maker.get(value)
            if before is not None and before.index not in visited and assignment.node_stage[before.index] == stage:
                visited.add(before.index)
                waiting.append(before)
    return None
