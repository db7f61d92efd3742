"""What the search finds and what the sharded run needs: plain data, the same on every rank, and picklable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from lightning_hybrid.parts.placement import Placement, Replicated, Shard

Role = Literal["column", "row", "gathered", "attention", "vocabulary"]
Site = tuple[object, ...]  # name of the operation, then file and line of the user's innermost calls
Rule = tuple[object, ...] | None
Deal = Literal["tensor", "context"] | None  # whether positions are dealt beside features, alone, or not
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
        by: "tensor": dealt between regions, gathered on the way into one and dealt again behind it (sequence
            parallelism, Korthikanti et al. 2022, section 4.2). "context": dealt throughout; in regions the ranks
            exchange positions for features.
        place: Which leaf of the arguments is the sequence.
        dim: Its dim that holds the positions.
        num_dims: How many it has; where a call has others, nothing is dealt.
        outputs: Places among the leaves of the unit's result that come out dealt.
        shown: Modules whose code is shown the length of the whole sequence.
        inputs: For each of them and each linear that is cut, the places among its arguments that come in dealt.
        summed: Parameters that each rank uses on its own positions; their gradients are summed.
        features: For "context", how the features of each linear of a region are arranged, by FQN.
        parts: For "context", parameters of which each rank uses a part in regions, whole at rest.
    """

    by: Literal["tensor", "context"]
    place: int
    dim: int
    num_dims: int
    outputs: tuple[int, ...] = ()
    shown: tuple[str, ...] = ()
    inputs: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    summed: tuple[str, ...] = ()
    features: Mapping[str, Shard] = field(default_factory=dict)
    parts: Mapping[str, Shard] = field(default_factory=dict)


@dataclass(frozen=True)
class UnitPlan:
    """How one unit runs sharded over tensor ranks, proved; made by `plan_unit`.

    Attributes:
        size: Number of tensor ranks.
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
        uneven: Linears that are not cut in a pair for a size of theirs: FQN -> size, and what it counts.
        notes: What else the user should know.
        num_trials: How often the unit was run sharded to find this.
        seconds: How long that took.
    """

    size: int
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
    uneven: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
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

    def lines(self) -> list[str]:
        """The plan in words, one line for each group and each reason to keep something whole."""
        lines = [str(group) for group in self.groups]
        if self.positions is not None:
            where = "between these" if self.positions.by == "tensor" else "and exchanged for heads in these"
            lines.append(f"positions dealt to the ranks {where}" if lines else "positions dealt to the ranks")
        elif self.undealt:
            lines.append(f"all positions on every rank ({self.undealt})")
        lines += self.notes
        reasons: dict[str, list[str]] = {}
        for fqn, reason in self.kept.items():
            reasons.setdefault(reason, []).append(fqn)
        lines += [f"whole on every rank ({reason}): {', '.join(fqns)}" for reason, fqns in reasons.items()]
        return [f"warning: {line}" if NOT_A_MULTIPLE in line else line for line in lines]
