"""The stages of a module: its first recorded step gives each unit, parameter and buffer an owner."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.collectives.tensors import as_sendable, broadcast_buffer
from lightning_hybrid.errors import WITHOUT_STAGES, StepError
from lightning_hybrid.graph import partition
from lightning_hybrid.graph.partition import Assignment
from lightning_hybrid.graph.step_graph import Node, Value
from lightning_hybrid.pipeline.stages.missing import MissingGradients
from lightning_hybrid.randomness.keyed import KeyedRandomness
from lightning_hybrid.schedule import (
    Schedule,
    StageCosts,
    forward_only,
    make_schedule,
    placement_of,
    with_widths,
)
from lightning_hybrid.step.module_state.attributes import compute_weights
from lightning_hybrid.step.objects.modules import modules_in, parameters_of
from lightning_hybrid.step.recording.units import UnitChoice
from lightning_hybrid.step.replay.stage import StageReplay
from lightning_hybrid.step.standins.tensors import drop, fill, is_absent
from lightning_hybrid.step.tracing.recording import Recording

if TYPE_CHECKING:
    from lightning_hybrid.step.recording.record import Recipe

ELSEWHERE = -1  # a stage without operations


@dataclass(frozen=True, eq=False)
class TraceVariant:
    """One recording of a step with its assignment to stages; microbatches of different shapes have different ones."""

    assignment: Assignment  # the stages that compute and need each value
    # by stage, for the stages of this rank; ``ELSEWHERE`` for the microbatches that other ranks of a stage run
    replays: Mapping[int, StageReplay]

    @cached_property
    def operations(self) -> list[Node]:
        """The nodes that lead to messages and to the loss, in the order of execution."""
        graph = self.assignment.graph
        needed = {value for sent in self.assignment.portals.values() for value in sent} | {graph.loss}
        found = []
        for node in reversed(graph.nodes):
            if not needed.isdisjoint(node.outputs):
                needed.update(node.inputs, node.reads)
                found.append(node)
        return found[::-1]

    @cached_property
    def digest(self) -> int:
        """A checksum of these nodes; ranks compare it to check their traces."""
        values, portals = self.assignment.graph.values, self.assignment.portals.items()
        sent = [(pair, [values[v].shape for v in indices]) for pair, indices in portals]
        return zlib.crc32(repr(([node.name for node in self.operations], sent)).encode())

    @property
    def loss(self) -> int:
        """The value that is the loss of a training step."""
        assert self.assignment.graph.loss is not None
        return self.assignment.graph.loss

    @cached_property
    def missing_grads(self) -> MissingGradients:
        """The values without a gradient, as far as batches have shown them."""
        return MissingGradients()

    @property
    def recording(self) -> Recording:
        """The recording of the step."""
        return next(iter(self.replays.values())).recording

    @cached_property
    def written(self) -> frozenset[str]:
        """FQNs of the parameters and tracked buffers that the step itself writes."""
        return frozenset(name for node in self.assignment.graph.nodes for name in node.written)

    @cached_property
    def unit_stages(self) -> Mapping[str, int]:
        """The stage that first runs a unit, by FQN, in the order in which they run."""
        stages: dict[str, int] = {}
        for node, stage in zip(self.assignment.graph.nodes, self.assignment.node_stage, strict=True):
            if node.unit:
                stages.setdefault(node.unit, stage)
        return stages

    @cached_property
    def gradient_portals(self) -> Mapping[tuple[int, int], tuple[int, ...]]:
        """The portals through which gradients are sent back, with the indices of their values."""
        return self.assignment.gradient_portals()

    @cached_property
    def largest_message(self) -> int:
        """Bytes of the largest message of a microbatch."""
        values = self.assignment.graph.values
        sizes = [
            sum(math.prod(values[i].shape) * getattr(torch, values[i].dtype).itemsize for i in sent)
            for sent in self.assignment.portals.values()
        ]
        return max(sizes, default=0)

    def message_values(self, direction: str, source: int, target: int) -> list[Value]:
        """The values of one message."""
        key = direction, source, target
        if key not in self._message_values:
            forward = direction == "forward"
            portals = self.assignment.portals if forward else self.gradient_portals
            indices = portals.get((source, target) if forward else (target, source), ())
            self._message_values[key] = [self.assignment.graph.values[index] for index in indices]
        return self._message_values[key]

    @cached_property
    def _message_values(self) -> dict[tuple[str, int, int], list[Value]]:
        return {}


class StagePlan:
    """The partition of one module into stages.

    Attributes:
        owner_stages: The stage of each parameter and tracked buffer, by FQN; empty before the partition.
        first: The first trace, which has decided the partition.
        unit_choice: The choice of units of the next recording.
        units: The modules that are one node each in the latest recording, by FQN.
        tracked_buffers: FQNs of the buffers that have owners as parameters do.
        widths: The number of ranks of each stage; empty where each has one, or each rank has equally many.
        chooses_widths: Whether the partition decides the widths, and so the number of stages.
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
        widths: Sequence[int] | Literal["auto"] = (),
        closes_mixtures: bool = False,
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
            widths: Number of ranks of each stage, which take its microbatches in turn; one each if empty. If "auto",
                the partition decides them.
            closes_mixtures: Whether ranks share experts, lists of which are then on one stage.
            agree: Returns the first rank's argument on every rank; replicas must have the same partition.
            first_failure: Returns the first rank that has an error, and that error, on every rank; None without any.
        """
        self.num_ranks, self.rank, self.stages_per_rank = group.size(), group.rank(), stages_per_rank
        self.chooses_widths = widths == "auto"
        self.widths: tuple[int, ...] = () if isinstance(widths, str) else tuple(widths)
        self._schedule, self._max_in_flight = schedule, max_microbatches_in_flight
        self._placement = placement_of(schedule, stages_per_rank)
        self.stage_costs: list[float] = []
        self.owner_stages: dict[str, int] = {}
        self.first: TraceVariant | None = None
        self.root, self.group, self.randomness = root, group, randomness
        self.cuts, self.agree, self.first_failure = cuts, agree, first_failure
        self.unit_choice = UnitChoice(root, self.num_stages, closes_mixtures=closes_mixtures)
        self.units: Mapping[str, nn.Module] = {}
        self.tracked_buffers, self.on_all_stages = set[str](), set[str]()
        self._places = self.evaluation_schedule(1)  # all schedules place the stages of these widths alike

    @property
    def num_stages(self) -> int:
        """The number of stages; the most that there can be before the partition decides their widths."""
        return len(self.widths) or self.most_stages

    @property
    def most_stages(self) -> int:
        """The number of stages if each has one rank."""
        return self.num_ranks * self.stages_per_rank

    @property
    def ranks_of_stages(self) -> Sequence[Sequence[int]]:
        """The pipeline ranks that hold each stage; the first one counts it."""
        return self._places.ranks_of_stages

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages of this rank."""
        return tuple(stage for stage, ranks in enumerate(self.ranks_of_stages) if self.rank in ranks)

    def recipe(self, name: str, step: Callable[[], Any], **how: Any) -> Recipe:
        """How to record a step of the module, bound to its arguments, with the units known so far."""
        from lightning_hybrid.step.recording.record import Recipe

        return Recipe(self.root, step, self.units, name, self.randomness, tracked=self.tracked_buffers, **how)

    def rank_of(self, stage: int, microbatch: int = 0) -> int:
        """The pipeline rank that runs a microbatch of a stage."""
        return self._places.rank_of(stage, microbatch)

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
            widths=self.widths,
        )

    def evaluation_schedule(self, num_microbatches: int) -> Schedule:
        """The schedule of a step without backward."""
        if self.widths:
            return with_widths("forward_only", self.widths, num_microbatches)
        return forward_only(self.num_ranks, num_microbatches, self.stages_per_rank, self._placement)

    def ranks_of(self, fqn: str) -> tuple[int, ...]:
        """Pipeline ranks that own a parameter or tracked buffer; the first one counts it."""
        return tuple(dict.fromkeys(rank for stage in self.stages_of(fqn) for rank in self.ranks_of_stages[stage]))

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

    def adopt_partition(
        self,
        opened: set[str],
        closed: set[str],
        tracked: set[str],
        owner_stages: dict[str, int],
        widths: tuple[int, ...],
        costs: list[float],
    ) -> None:
        """Take the partition that the ranks agree on: units, tracked buffers, owners, widths and costs of stages."""
        self.unit_choice.adopt(opened, closed)
        self.widths = widths
        self._places = self.evaluation_schedule(1)
        self.tracked_buffers, self.owner_stages, self.stage_costs = tracked, owner_stages, costs

    def go_back(self, opened: set[str], tracked: set[str]) -> None:
        """Open and track no more than these, after a recording that failed."""
        self.unit_choice.adopt(self.unit_choice.opened & opened, self.unit_choice.closed)
        self.tracked_buffers &= tracked

    def share_unread(self, recording: Recording) -> None:
        """Let each stage hold the parameters that a recording with guards has not read: its other branches may."""
        read = {name for node in recording.graph.nodes for name in node.parameters}
        self.on_all_stages = {name for name, _ in self.root.named_parameters()} - read
        self.owner_stages.update(dict.fromkeys(self.on_all_stages, 0))

    def adopt(self, variant: TraceVariant, units: Mapping[str, nn.Module]) -> None:
        """Take the units of a recorded step; the partition follows the first one."""
        self.units, self.first = units, self.first or variant

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
        """Assign a recording to stages, by the owners of its parameters."""
        self._add_owners(recording)
        assignment = partition.assign(recording.graph, self.owner_stages, self.num_stages)
        self._check_writes(assignment)
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

    def _check_writes(self, assignment: Assignment) -> None:
        """Refuse a step that writes a parameter or buffer on a stage that several ranks hold."""
        for node, stage in zip(assignment.graph.nodes, assignment.node_stage, strict=True):
            if node.written and len(self.ranks_of_stages[stage]) > 1:
                raise StepError(
                    f"{node.line}: {assignment.graph.step} writes {node.written[0]!r} on stage {stage}, which"
                    f" stage_widths gives {len(self.ranks_of_stages[stage])} ranks, each of which runs some of the"
                    f" microbatches: none has what all of them write. Give its stage one rank, or {WITHOUT_STAGES}",
                    entry="wide-buffers",
                )

    def unit_buffers(self) -> list[tuple[Tensor, int]]:
        """The buffers inside units, of any shape, and the stage on which the first step runs these."""
        if self.first is None:
            return []
        units, stages = self.first.recording.units, self.first.unit_stages.items()
        pairs = [(buffer, stage) for fqn, stage in stages for buffer in units[fqn].buffers()]
        return list({id(buffer): (buffer, stage) for buffer, stage in reversed(pairs)}.values())[::-1]

    def shared_buffers(self) -> dict[str, Tensor]:
        """The buffers of this rank's stage inside units, of any shape, by FQN, if other ranks hold the stage too."""
        stage = self.stages[0]
        if len(self.ranks_of_stages[stage]) == 1:
            return {}
        here = {id(buffer) for buffer, owner in self.unit_buffers() if owner == stage}
        return {name: buffer for name, buffer in self.root.named_buffers() if id(buffer) in here}


def check_parameter_owners(
    assignment: Assignment,
    owner_stages: Mapping[str, int],
    rank_of: Callable[[int], int],
    ranks_of: Callable[[str], tuple[int, ...]],
) -> None:
    """Refuse a step that reads a parameter on ranks that do not own it."""
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


def drop_remote_parameters(plan: StagePlan) -> None:
    """Free the parameters that other ranks own; the objects stay, as absent tensors."""
    for name, parameter in plan.root.named_parameters():
        if plan.rank not in plan.ranks_of(name) and not is_absent(parameter):
            drop(parameter)


def drop_absent_in_copy(root: nn.Module, copy: nn.Module) -> None:
    """Free the parameters of a copy of the module that are absent in the module itself."""
    for original, copied in zip(root.parameters(), copy.parameters(), strict=True):
        if is_absent(original) and not is_absent(copied):
            drop(copied)


def unshard_parameters(plan: StagePlan, copy: nn.Module | None = None, kept_on: torch.device | None = None) -> None:
    """Broadcast all parameters and buffers from their owners to every rank, in the module or a copy; collective.

    ``kept_on`` is where parameters of other ranks stay once they have arrived; where they were if None.
    """
    if plan.num_ranks == 1 or not plan.is_partitioned:
        return
    device = plan.randomness.device
    for name, parameter in (plan.root if copy is None else copy).named_parameters():
        owners = plan.ranks_of(name)
        if len(owners) == plan.num_ranks:
            continue
        here = not is_absent(parameter)
        content = parameter.detach() if here else torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        content = content.to(device).contiguous()
        dist.broadcast(as_sendable(content), group=plan.group, group_src=owners[0])
        if is_absent(parameter):
            content = content.to(kept_on or parameter.device)
            fill(parameter, nn.Parameter(content, requires_grad=parameter.requires_grad))
    for buffer, owner in buffer_owners(plan, copy):
        broadcast_buffer(buffer, owner, plan.group, device)
    compute_weights(plan.root if copy is None else copy)


def buffer_owners(plan: StagePlan, copy: nn.Module | None = None) -> list[tuple[Tensor, int]]:
    """Buffers, of any shape, that are valid on one rank only (inside units, and tracked ones); each with this rank."""
    if plan.first is None:
        return []
    if copy is not None:
        ranks = buffer_ranks(plan)
        pairs = zip(plan.root.buffers(), copy.buffers(), strict=True)
        return [(copied, ranks[id(buffer)]) for buffer, copied in pairs if id(buffer) in ranks]
    owners = {id(buffer): (buffer, plan.rank_of(stage)) for buffer, stage in plan.unit_buffers()}
    for name, buffer in plan.root.named_buffers():
        if name in plan.tracked_buffers:
            owners[id(buffer)] = buffer, plan.ranks_of(name)[0]
    return list(owners.values())


def buffer_ranks(plan: StagePlan, copy: nn.Module | None = None) -> dict[int, int]:
    """Pipeline rank on which a buffer (of a copy) is valid, by id of the buffer; others are valid everywhere."""
    return {id(buffer): owner for buffer, owner in buffer_owners(plan, copy)}


def repeated_buffers(plan: StagePlan) -> list[tuple[dict[str, Any], str]]:
    """The buffers that every stage writes, since no value of the model enters them: their dicts and keys."""
    if plan.stages_per_rank == 1 or plan.first is None:
        return []
    inside = {id(buffer) for unit in plan.first.recording.units.values() for buffer in unit.buffers()}
    return [
        (module._buffers, member)
        for fqn, module in plan.root.named_modules()
        for member, buffer in module._buffers.items()
        if id(buffer) not in inside and (f"{fqn}.{member}" if fqn else member) not in plan.tracked_buffers
    ]


def broadcast_buffers(plan: StagePlan, variants: Iterable[TraceVariant]) -> None:
    """Broadcast tracked buffers after a step to the other stages that read them; collective over the pipeline."""
    if not plan.tracked_buffers or plan.num_ranks == 1:
        return
    buffers = dict(plan.root.named_buffers())
    for name in sorted(plan.tracked_buffers):
        if any(len(variant.assignment.holders.get(name, ())) > 1 for variant in dict.fromkeys(variants)):
            broadcast_buffer(buffers[name], plan.ranks_of(name)[0], plan.group, plan.randomness.device)
