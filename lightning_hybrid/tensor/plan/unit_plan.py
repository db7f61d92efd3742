"""The tensor plan of a unit: plain data, the same on every rank, and picklable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import nn

from lightning_hybrid.parts.placement import Placement, Replicated, Shard, over_two

Role = Literal["column", "row", "gathered", "attention", "vocabulary"]
Site = tuple[object, ...]  # name of the operation, then file and line of the user's innermost calls
Rule = tuple[object, ...] | None
Axis = Literal["tensor", "context"]
DealtBy = Literal["tensor", "context", "both"]
Deal = Literal["tensor"] | None  # whether positions are dealt to tensor ranks, between what they share
NOT_A_MULTIPLE = "not a multiple of"  # in each reason that is a size which the number of ranks does not divide


@dataclass(frozen=True)
class LinearLike:
    """A module that multiplies by a weight: a linear layer, however it stores its weight, or a convolution.

    Attributes:
        fqn: Its name inside the unit.
        out_dim: The dim of the weight that holds the output features (filters).
        in_dim: The dim of the weight that holds the input features (channels).
        feature_dim: The dim of inputs and outputs that holds the features, counted from the end.
        is_convolution: Whether the module's own forward is called; otherwise it is one matrix product.
        num_out: Output features.
        num_in: Input features.
        has_bias: Whether a bias is added.
    """

    fqn: str
    out_dim: int
    in_dim: int
    feature_dim: int
    is_convolution: bool
    num_out: int
    num_in: int
    has_bias: bool

    def parameter(self, name: str) -> str:
        """The FQN of its weight or bias."""
        return f"{self.fqn}.{name}" if self.fqn else name


@dataclass(frozen=True)
class Group:
    """Linears that are sharded together; one sum over ranks forward, one for each of its inputs backward.

    Attributes:
        role: "column" for columns that feed rows, "gathered" for one whose output is gathered, "attention" for an
            `nn.MultiheadAttention`, "vocabulary" for weights of embeddings and heads that are cut by their vocabulary.
        columns: FQNs of the linears cut by output features; for "attention", of the module; for "vocabulary", of the
            parameters.
        rows: FQNs of the linears cut by input features.
        how: In words, which variant was proved, or why an output is gathered.
        origin: In words, who says that these are cut.
    """

    role: Role
    columns: tuple[str, ...]
    rows: tuple[str, ...] = ()
    how: str = ""
    origin: str = "found"

    def __str__(self) -> str:
        rows = f" -> {', '.join(self.rows)}" if self.rows else ""
        return f"{', '.join(fqn or 'it' for fqn in self.columns)}{rows} ({self.origin}: {self.how or self.role})"


@dataclass(frozen=True)
class PositionsPlan:
    """How the positions of a unit's sequence are dealt to the ranks while it runs; proved like the rest.

    Attributes:
        by: "tensor": dealt to tensor ranks between regions, gathered on the way into one and dealt again behind it
            (sequence parallelism, Korthikanti et al. 2022, section 4.2). "context": dealt to context ranks throughout;
            in regions that mix positions they exchange them for features. "both": what context ranks have is dealt once
            more to the tensor ranks of each, between regions.
        place: Which leaf of the arguments is the sequence.
        dim: Its dim that holds the positions.
        num_dims: How many it has; where a call has others, nothing is dealt.
        outputs: Places among the leaves of the unit's result that come out dealt.
        shown: Modules whose code is shown the length of the whole sequence.
        inputs: For each of them and each linear that is cut, the places among its arguments that come in dealt.
        summed_over_tensor: Parameters that each tensor rank uses on its own positions; their gradients are summed.
        summed_over_context: The same for context ranks.
        features: For context ranks, how the features of each linear of such a region lie on all ranks, tensor ranks
            times context ranks, by FQN; of other linears context ranks have their own positions.
        parts: For context ranks, parameters that are cut over all ranks in such a region, and at rest over tensor
            ranks.
    """

    by: DealtBy
    place: int
    dim: int
    num_dims: int
    outputs: tuple[int, ...] = ()
    shown: tuple[str, ...] = ()
    inputs: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    summed_over_tensor: tuple[str, ...] = ()
    summed_over_context: tuple[str, ...] = ()
    features: Mapping[str, Shard] = field(default_factory=dict)
    parts: Mapping[str, Shard] = field(default_factory=dict)


@dataclass(frozen=True)
class UnitPlan:
    """How one unit runs sharded over tensor ranks, proved; made by `plan_unit`.

    Attributes:
        size: Number of tensor ranks.
        context: Number of context ranks.
        groups: What is sharded.
        roles: The role of each linear or attention module, by FQN inside the unit.
        linears: What each of them is.
        placements: Of every parameter and buffer of the unit, by FQN.
        shared_pieces: Parameters that are cut, some ranks holding the same part; their gradients are summed.
        summed: Replicated parameters that each rank uses on its own features; their gradients are summed.
        attributes: Whole numbers of modules that differ while the unit runs sharded: FQN -> name -> value.
        rules: What is rewritten at which call of the user's code.
        offsets: Columns into whose outputs the code writes offsets in terms of the whole.
        outputs: Results of the unit that are cut: place among the leaves of its output -> dim; they are gathered.
        vocabulary: Parameters that are used as wholes of which each rank has its rows: FQN -> dim.
        outside: Those of them that code outside of the unit uses too.
        watched: Whether operations are watched while the unit runs, to rewrite sizes or to let side values enter.
        quiet: Places among the leaves of the example's arguments that may need a gradient without a watch.
        kept: Parameters that stay whole on every rank, each with the reason.
        positions: How positions are dealt, if they are.
        undealt: Why they are not, if that was asked for.
        otherwise: For tensor ranks beside context ranks: the plan for calls whose positions are not dealt.
        uneven: Linears that are not cut in a pair for a size of theirs: FQN -> size, and what it counts.
        notes: What else the user should know.
        calls: Which lines of the user's code called torch in trials; see ``proved_calls``.
        num_trials: How often the unit was run sharded to find this.
        seconds: How long that took.
    """

    size: int
    context: int = 1
    groups: tuple[Group, ...] = ()
    roles: Mapping[str, Role] = field(default_factory=dict)
    linears: Mapping[str, LinearLike] = field(default_factory=dict)
    placements: Mapping[str, Placement] = field(default_factory=dict)
    shared_pieces: tuple[str, ...] = ()
    summed: tuple[str, ...] = ()
    attributes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    rules: Mapping[Site, Rule] = field(default_factory=dict)
    offsets: frozenset[str] = frozenset()
    outputs: Mapping[int, int] = field(default_factory=dict)
    vocabulary: Mapping[str, int] = field(default_factory=dict)
    outside: tuple[str, ...] = ()
    watched: bool = False
    quiet: frozenset[int] = frozenset()
    kept: Mapping[str, str] = field(default_factory=dict)
    positions: PositionsPlan | None = None
    undealt: str = ""
    otherwise: UnitPlan | None = None
    uneven: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    calls: frozenset[int] = frozenset()
    num_trials: int = 0
    seconds: float = 0.0

    @classmethod
    def whole(cls, unit: nn.Module, size: int, reason: str) -> UnitPlan:
        """A plan that cuts nothing.

        Args:
            unit: The unit.
            size: Number of tensor ranks.
            reason: Why, in words.
        """
        parameters = [fqn for fqn, _ in unit.named_parameters()]
        buffers = [fqn for fqn, _ in unit.named_buffers()]
        placements = dict.fromkeys((*parameters, *buffers), Replicated())
        return cls(size=size, placements=placements, kept=dict.fromkeys(parameters, reason))

    @property
    def num_sharded(self) -> int:
        """How many parameters and buffers are cut."""
        return sum(isinstance(placement, Shard) for placement in self.placements.values())

    def exchanges(self, group: Group) -> bool:
        """Whether context ranks exchange positions for features in a group."""
        if self.positions is None or self.positions.by == "tensor":
            return False
        return group.role == "attention" or any(fqn in self.positions.features for fqn in group.columns)

    def lines(self) -> list[str]:
        """The plan in words, one line for each group and each reason to keep something whole."""
        lines = [str(group) for group in self.groups]
        if self.positions is not None and self.positions.by == "tensor":
            lines.append("positions dealt to the ranks between these")
        elif self.positions is not None:
            exchanging = "; ".join(", ".join(group.columns) or "it" for group in self.groups if self.exchanges(group))
            where = f", and exchanged for heads from {exchanging} on" if exchanging else ""
            further = ", and to the tensor ranks of each between these" if self.positions.by == "both" else ""
            lines.append(f"positions dealt to {self.context} context ranks{further}{where}")
        elif self.undealt:
            lines.append(f"all positions on every rank ({self.undealt})")
        lines += self.notes
        reasons: dict[str, list[str]] = {}
        for fqn, reason in self.kept.items():
            reasons.setdefault(reason, []).append(fqn)
        lines += [f"whole on every rank ({reason}): {', '.join(fqns)}" for reason, fqns in reasons.items()]
        return [f"warning: {line}" if NOT_A_MULTIPLE in line else line for line in lines]


def local_positions(plan: UnitPlan) -> PositionsPlan | None:
    """How positions are dealt, with features and parts as context ranks share what a tensor rank has of them."""
    positions = plan.positions
    if positions is None or positions.by == "tensor":
        return positions

    def of_context(placements: Mapping[str, Shard]) -> dict[str, Shard]:
        found = {}
        for fqn, placement in placements.items():
            cuts = over_two(placement, plan.size, plan.context)
            if cuts is None:
                raise ValueError(f"{fqn} is not cut over {plan.size} tensor ranks and {plan.context} context ranks")
            found[fqn] = cuts[1]
        return found

    return replace(positions, features=of_context(positions.features), parts=of_context(positions.parts))
