"""The tensor plan of a unit: plain data, the same on every rank, and picklable."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import nn

from lightning_hybrid.params.placement import Placement, Replicated, Shard, split_over_two_axes

Role = Literal["column", "row", "gathered", "attention", "vocabulary"]
Site = tuple[object, ...]  # name of the operation, then file and line of the user's innermost calls
Rule = tuple[object, ...] | None
Axis = Literal["tensor", "context"]
SequenceAxes = Literal["tensor", "context", "both"]
SequenceParallel = Literal["tensor"] | None  # sequence parallelism: positions sharded over tensor ranks between regions
FOUND = "found"  # by the search
RING = "ring attention"  # the first item of the sites of attention calls, whose rules say what the keys are
NO_LINEAR = "no weight of a linear"  # the reason of parameters that no linear multiplies by
ONE_TENSOR_RANK = "context ranks hold all parameters"
NOT_A_MULTIPLE = "not a multiple of"  # in each reason that names a size which the number of ranks does not divide


@dataclass(frozen=True)
class LinearLike:
    """A module that multiplies its input by a weight: a linear layer, in either weight layout, or a convolution."""

    fqn: str  # FQN inside the unit
    out_dim: int  # dim of the weight that holds the output features (filters)
    in_dim: int  # dim of the weight that holds the input features (channels)
    feature_dim: int  # dim of inputs and outputs that holds the features, counted from the end
    is_convolution: bool  # whether the module's own forward is called; otherwise it is one matrix product
    num_out: int  # number of output features
    num_in: int  # number of input features
    has_bias: bool  # whether a bias is added

    def parameter(self, name: str) -> str:
        """The FQN of its weight or bias."""
        return f"{self.fqn}.{name}" if self.fqn else name


@dataclass(frozen=True)
class Group:
    """Linears that are sharded together: one all-reduce in the forward, one for each input in the backward."""

    # "column" for column-parallel linears that feed row-parallel ones, "gathered" for one whose output is gathered,
    # "attention" for an `nn.MultiheadAttention`, "vocabulary" for vocabulary-parallel weights
    role: Role
    # FQNs of the column-parallel linears, of the module ("attention") or of the parameters ("vocabulary")
    columns: tuple[str, ...]
    rows: tuple[str, ...] = ()  # FQNs of the row-parallel linears
    how: str = ""  # description of the variant that was proved, or the reason why an output is gathered
    origin: str = FOUND  # the authority: the search, the user's plan, or the model's own plan

    def __str__(self) -> str:
        rows = f" -> {', '.join(self.rows)}" if self.rows else ""
        authority = "" if self.origin == FOUND else f"{self.origin}: "
        return f"{', '.join(fqn or 'it' for fqn in self.columns)}{rows} ({authority}{self.how or self.role})"


@dataclass(frozen=True)
class PositionsPlan:
    """How the positions of a unit's sequence are sharded over ranks while it runs; proved with the rest of the plan."""

    # "tensor": sharded over tensor ranks between regions, all-gathered before a region and reduce-scattered after it
    # (sequence parallelism, Korthikanti et al. 2022, section 4.2). "context": sharded over context ranks throughout;
    # regions that mix positions exchange them for features (all-to-all), or attend by ring attention. "both": the shard
    # of a context rank is sharded again over its tensor ranks, between regions.
    by: SequenceAxes | Literal[""]
    leaf_index: int  # index of the sequence among the leaves of the arguments
    dim: int  # dim of the sequence that holds the positions
    num_dims: int  # number of dims of the sequence; in calls with another number nothing is sharded
    outputs: tuple[int, ...] = ()  # indices of the leaves of the unit's result that come out sharded
    shown: tuple[str, ...] = ()  # modules whose code sees the length of the full sequence
    # for each of them and each sharded linear, the indices of the arguments that come in sharded
    inputs: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    # parameters that each tensor rank uses on its local positions; their gradients are summed
    summed_over_tensor: tuple[str, ...] = ()
    summed_over_context: tuple[str, ...] = ()  # the same for context ranks
    # for context ranks, how the features of each linear of an exchanging region are sharded over all ranks, tensor
    # ranks times context ranks, by FQN; other linears run on the local positions of a context rank
    features: Mapping[str, Shard] = field(default_factory=dict)
    # parameters sharded over all ranks in such a region, over tensor ranks in storage
    parameter_shards: Mapping[str, Shard] = field(default_factory=dict)
    ring_attention: bool = False  # for context ranks, whether no region exchanges and queries attend by ring attention


FULL_POSITIONS = PositionsPlan("", 0, 0, 0)  # each rank has all positions


@dataclass(frozen=True)
class UnitPlan:
    """How one unit runs sharded over tensor ranks, proved equivalent; made by `plan_unit`."""

    size: int  # number of tensor ranks
    context: int = 1  # number of context ranks
    groups: tuple[Group, ...] = ()  # the groups of linears that are sharded
    # the role of each linear or attention module, by FQN inside the unit
    roles: Mapping[str, Role] = field(default_factory=dict)
    linears: Mapping[str, LinearLike] = field(default_factory=dict)  # weight layout and sizes of each linear among them
    # placement of every parameter and buffer of the unit, by FQN
    placements: Mapping[str, Placement] = field(default_factory=dict)
    # sharded parameters of which several ranks hold the same shard; their gradients are summed
    shared_pieces: tuple[str, ...] = ()
    # replicated parameters that each rank uses on its local features; their gradients are summed
    summed: tuple[str, ...] = ()
    # integer attributes of modules that differ while the unit runs sharded: FQN -> name -> value
    attributes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    # the rewrite at each call of the user's code that needs one
    rules: Mapping[Site, Rule] = field(default_factory=dict)
    # column-parallel linears into whose outputs the code indexes with offsets of the full output
    offsets: frozenset[str] = frozenset()
    # results of the unit that come out sharded: index among the leaves of its output -> dim; all-gathered
    outputs: Mapping[int, int] = field(default_factory=dict)
    # vocabulary-parallel parameters, of which each rank has its rows: FQN -> dim
    vocabulary: Mapping[str, int] = field(default_factory=dict)
    outside: tuple[str, ...] = ()  # those of them that code outside of the unit uses too
    # whether the unit runs under `RegionMode`, which rewrites sizes and lets captured values enter
    watched: bool = False
    # indices of the leaves of the example's arguments that may need a gradient without `RegionMode`
    grad_inputs: frozenset[int] = frozenset()
    # parameters that stay replicated, each with the reason
    replicated_reasons: Mapping[str, str] = field(default_factory=dict)
    positions: PositionsPlan | None = None  # how the sequence is sharded, if it is
    full_sequence_reason: str = ""  # why the sequence is not sharded, if that was requested
    # for tensor ranks with context ranks: the plan for calls whose sequence is not sharded
    full_sequence_plan: UnitPlan | None = None
    # linears that are in no pair because of a size: FQN -> size, and what it counts
    uneven: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # further lines for the user
    # the lines of the user's code that called torch in trials, as `ProvedCalls` compares them
    calls: frozenset[int] = frozenset()
    num_trials: int = 0  # number of sharded runs of the unit in the search
    seconds: float = 0.0  # duration of the search

    @classmethod
    def unsharded(cls, unit: nn.Module, size: int, reason: str) -> UnitPlan:
        """Makes a plan that replicates all parameters and buffers over `size` tensor ranks, for a reason in words."""
        parameters = [fqn for fqn, _ in unit.named_parameters()]
        buffers = [fqn for fqn, _ in unit.named_buffers()]
        placements = dict.fromkeys((*parameters, *buffers), Replicated())
        return cls(size=size, placements=placements, replicated_reasons=dict.fromkeys(parameters, reason))

    @property
    def by(self) -> SequenceAxes | Literal[""]:
        """The axes that the sequence is sharded over; "" if it is not sharded."""
        return (self.positions or FULL_POSITIONS).by

    @property
    def is_sharded(self) -> bool:
        """Whether parameters, buffers or the sequence are sharded."""
        return bool(self.num_sharded or self.by)

    @property
    def num_sharded(self) -> int:
        """Number of sharded parameters and buffers."""
        return sum(isinstance(placement, Shard) for placement in self.placements.values())

    def exchanges(self, group: Group) -> bool:
        """Whether context ranks exchange positions for features in a group."""
        if self.positions is None or self.by == "tensor" or self.positions.ring_attention:
            return False
        return group.role == "attention" or any(fqn in self.positions.features for fqn in group.columns)

    def lines(self) -> list[str]:
        """Describes the plan, one line for each group and each reason to replicate parameters."""
        gathered: dict[str, list[str]] = {}
        for group in self.groups:
            if group.role == "gathered" and NOT_A_MULTIPLE in group.how:
                gathered.setdefault(group.how, []).extend(group.columns)
        lines = [str(group) for group in self.groups if group.how not in gathered]
        lines += [str(Group("gathered", tuple(fqns), how=how)) for how, fqns in gathered.items()]
        if self.by == "tensor":
            lines.append("sequence sharded over the ranks between these")
        elif self.positions is not None:
            exchanging = "; ".join(", ".join(group.columns) or "it" for group in self.groups if self.exchanges(group))
            where = f", and exchanged for heads from {exchanging} on" if exchanging else ""
            where += ", which attend by ring attention" * self.positions.ring_attention
            further = ", and over the tensor ranks of each between these" if self.by == "both" else ""
            lines.append(f"sequence sharded over {self.context} context ranks{further}{where}")
        elif self.full_sequence_reason:
            lines.append(f"full sequence on every rank ({self.full_sequence_reason})")
        lines += self.notes
        reasons: dict[str, list[str]] = {}
        for fqn, reason in self.replicated_reasons.items():
            reasons.setdefault(reason, []).append(fqn)
        lines += [f"replicated ({reason}): {', '.join(fqns)}" for reason, fqns in reasons.items()]
        warned = [f"warning: {line}" if NOT_A_MULTIPLE in line else line for line in lines]
        divisor = math.gcd(*(count for count, _ in self.uneven.values()))
        if warned != lines and divisor > 1 and self.context == 1:
            sizes = nearest_divisors(divisor, self.size)
            warned.append(f"to split them too, set tensor_parallel_size={sizes}, on as many devices")
        return warned


def nearest_divisors(number: int, size: int) -> str:
    """The two divisors of a number, above 1, that are nearest to a size, such as "2 or 4"; "" if there is none."""
    divisors = [each for each in range(2, number + 1) if number % each == 0]
    return " or ".join(map(str, sorted(sorted(divisors, key=lambda each: abs(each - size))[:2])))


def local_positions(plan: UnitPlan) -> PositionsPlan:
    """How the sequence is sharded, with the placements that shard a tensor rank's shard over context ranks."""
    positions = plan.positions or FULL_POSITIONS
    if plan.by in ("", "tensor"):
        return positions
    given = (positions.features, positions.parameter_shards)
    features, shards = (split_placements(each, plan.size, plan.context)[1] for each in given)
    return replace(positions, features=features, parameter_shards=shards)


def split_placements(
    placements: Mapping[str, Placement], size: int, context: int
) -> tuple[dict[str, Placement], dict[str, Any]]:
    """Splits placements over tensor ranks times context ranks, by FQN, into those over each axis.

    Raises:
        ValueError: A parameter cannot be sharded so.
    """
    over_tensor: dict[str, Placement] = {}
    over_context: dict[str, Any] = {}
    for fqn, placement in placements.items():
        cuts = split_over_two_axes(placement, size, context) if isinstance(placement, Shard) else (placement, placement)
        if cuts is None:
            raise ValueError(f"{fqn} is not sharded over {size} tensor ranks and {context} context ranks")
        over_tensor[fqn], over_context[fqn] = cuts
    return over_tensor, over_context
