"""An estimate of the memory of one rank: parameters, gradients, optimizer states, and activations in flight.

Plain arithmetic on sizes, where a step is recorded an upper bound: also of the layer that runs, or is recomputed, and
of its backward. What is not counted: the workspace of kernels, what the framework itself takes, and states of the layer
whose offloaded states step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from lightning_hybrid.graph.partition import Assignment
from lightning_hybrid.graph.step_graph import Node

SELECTIVE_SHARE = 0.4  # of the saved bytes that recompute="selective" keeps
Place = Literal["files", "host"]
Policies = Mapping[str, str | float]  # what layers save for the backward, by FQN
KINDS = ("parameters", "gradients", "optimizer_states", "activations")


def places_of(where: Mapping[str, str]) -> dict[str, Place]:
    """Return the place of each kind that is offloaded to "cpu" or "disk:PATH"."""
    return {what: "host" if storage == "cpu" else "files" for what, storage in where.items()}


class Footprint(NamedTuple):
    """Bytes that a rank holds of its parameters."""

    parameters: int  # between steps
    gradients: int  # between steps
    gathered: int  # during a step besides: full parameters, and gradients that are not reduced yet


@dataclass(frozen=True)
class ParameterOnRank:
    """Bytes of one parameter on one rank."""

    nbytes: int  # of the parameter that layers compute with, after tensor and expert ranks have sharded it
    shard_bytes: int  # of its shard over replicas, under ZeRO; ``nbytes`` without
    state_bytes: int | None  # of the optimizer's states for it; None if unknown
    is_trained: bool  # whether it takes gradients
    layer: str = ""  # the layer with which ZeRO gathers it
    gradient_size: int = 1  # bytes of its gradient for each of its own

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradient that the backward computes; 0 if it takes none."""
        return self.nbytes * self.gradient_size if self.is_trained else 0

    @property
    def gradient_shard_bytes(self) -> int:
        """Bytes of the shard of the gradient over replicas; 0 if it takes none."""
        return self.shard_bytes * self.gradient_size if self.is_trained else 0


@dataclass(frozen=True)
class RankMemory:
    """Bytes that one rank, or one of its stages, holds."""

    parameters: int  # between steps
    gradients: int  # between the backward and the optimizer's step; between steps that call these themselves
    optimizer_states: int | None  # after the first step; None if unknown
    activations: int | None  # saved for the backwards of all microbatches in flight; None if the step is not recorded
    gathered: int = 0  # by ZeRO during a step, besides these: full parameters, and gradients that are not reduced yet
    working: int = 0  # during a step, besides these: of the layer that runs, and of the optimizer's step
    messages: int = 0  # during a step, besides these: of values and gradients that are sent or received
    # where a kind is that does not take memory of the compute device; other kinds are left out
    places: Mapping[str, Place] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """The sum of what is known and not offloaded."""
        return self.between_steps + self.gathered + self.working + self.messages + (self.activations or 0)

    @property
    def between_steps(self) -> int:
        """The part of `total` that is footprint between steps; of the gradients too, which a step may leave."""
        return sum(size or 0 for size in self.sizes_in(None).values())

    def sizes_in(self, place: Place | None) -> dict[str, int | None]:
        """Return the bytes of parameters, gradients and optimizer states in a place; None is the compute device."""
        return {kind: getattr(self, kind) for kind in KINDS[:3] if self.places.get(kind) == place}

    @property
    def sizes(self) -> dict[str, int | None]:
        """The bytes of each kind, the total on the device, and what is offloaded to the host's memory."""
        kinds = {kind: value for kind, value in vars(self).items() if kind != "places"}
        host = sum(size or 0 for size in self.sizes_in("host").values())
        return {**kinds, "total": self.total, "host_total": host}

    def offloaded_to(self, where: Mapping[str, str]) -> RankMemory:
        """Return the memory of a rank whose compute device is not the host.

        ``where`` names "cpu" or "disk:PATH" for each kind that is offloaded.
        """
        return replace(self, places=places_of(where))

    def __add__(self, other: RankMemory) -> RankMemory:
        """The memory of both; unknown where either is."""
        return RankMemory(
            self.parameters + other.parameters,
            self.gradients + other.gradients,
            _sum([self.optimizer_states, other.optimizer_states]),
            _sum([self.activations, other.activations]),
            self.gathered + other.gathered,
            max(self.working, other.working),  # of a rank, which runs one stage at a time
            max(self.messages, other.messages),
            {**self.places, **other.places},
        )


def estimate_rank_memory(
    parameters: Iterable[ParameterOnRank], activations: int | None, footprint: Footprint | None = None, **others: Any
) -> RankMemory:
    """Estimate the memory of one rank, or of one of its stages; ``footprint`` tells what is not here at all times."""
    members = list(parameters)
    trained = [each for each in members if each.is_trained]
    here = footprint or Footprint(sum(each.nbytes for each in members), sum(each.gradient_bytes for each in trained), 0)
    states = _sum([each.state_bytes for each in trained])
    return RankMemory(optimizer_states=states, activations=activations, **here._asdict(), **others)


def activation_bytes(assignment: Assignment, policies: Policies) -> list[int]:
    """Return the bytes that each stage saves for the backward of one microbatch.

    Tensors inside of layers are counted before tensor and context ranks shard them.
    """
    inner = [0.0] * assignment.num_stages
    values: list[set[int]] = [set() for _ in range(assignment.num_stages)]
    for node, stage in zip(assignment.graph.nodes, assignment.node_stage, strict=True):
        share = _saved_share(node, policies)
        inner[stage] += share * node.saved_bytes
        # A layer that is recomputed saves its inputs.
        values[stage].update(node.saved_values if share == 1 else [v for v in node.saved_values if v in node.inputs])
    for (source, target), sent in assignment.portals.items():  # kept for the backward, which begins or ends at them
        values[source].update(sent)
        values[target].update(sent)
    sizes = [sum(assignment.graph.values[index].nbytes for index in indices) for indices in values]
    return [int(inside) + size for inside, size in zip(inner, sizes, strict=True)]


def working_bytes(assignment: Assignment, policies: Policies) -> list[int]:
    """Return an upper bound of the bytes that each stage takes while one of its layers runs, besides what is saved.

    In its backward a layer has its results again, if it is recomputed, and gradients of at most all of its results.
    """
    values, most = assignment.graph.values, [0] * assignment.num_stages
    for node, stage in zip(assignment.graph.nodes, assignment.node_stage, strict=True):
        share = _saved_share(node, policies)
        again = (1 - share) * node.saved_bytes + (share < 1) * sum(values[index].nbytes for index in node.saved_values)
        ends = sum(values[index].nbytes for index in {*node.inputs, *node.outputs})
        most[stage] = max(most[stage], int(again) + max(int(node.moved_bytes), node.saved_bytes) + ends)
    return most


def message_bytes(assignment: Assignment) -> list[int]:
    """Return an upper bound of the bytes of messages of each stage while it runs: a value and a gradient of each."""
    found = [0] * assignment.num_stages
    for ends, sent in assignment.portals.items():
        for stage in ends:
            found[stage] += 2 * sum(assignment.graph.values[index].nbytes for index in sent)
    return found


def _saved_share(node: Node, policies: Policies) -> float:
    """The share of its inner bytes that a node saves, by the policies of the layers in it, or of the one around it."""
    if not node.unit:
        return 1.0
    unit = f"{node.unit}."
    inside = [policy for fqn, policy in policies.items() if f"{fqn}.".startswith(unit) or unit.startswith(f"{fqn}.")]
    shares = {"keep": 1.0, "full": 0.0, "selective": SELECTIVE_SHARE}
    found = [shares[policy] if isinstance(policy, str) else policy for policy in inside]
    return sum(found) / len(found) if found else 1.0


def _sum(sizes: Sequence[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None
