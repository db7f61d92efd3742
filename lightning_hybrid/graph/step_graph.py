"""The step graph: what one run of a user's step does, as plain data.

Values are numbered; a node reads values and parameters and makes values. A *unit* (a module that a cut never enters)
is one node. Batch-only operations, which touch neither a parameter nor anything derived from one, run everywhere and
are not in the graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

SINK = "metric:"  # prefix of the pseudo-parameters that stand for the state of a metric


@dataclass(frozen=True)
class Value:
    """One tensor of the step.

    Attributes:
        index: Number of the value; also its place in ``StepGraph.values``.
        shape: Its shape in the recorded run.
        dtype: Name of its torch dtype, such as ``"float32"``.
        stride: Its strides, in elements.
        requires_grad: Whether a gradient flows back through it.
        dynamic: Whether its shape depends on data and not on the batch's shapes alone; it then travels with a header.
        device: Where it is on the rank that recorded it, such as "cpu" after ``.cpu()``; on the rank's device if empty.
        taken: What each element is if the model's numbers are finite; None if that does not tell.
    """

    index: int
    shape: tuple[int, ...]
    dtype: str
    stride: tuple[int, ...]
    requires_grad: bool
    dynamic: bool = False
    device: str = ""
    taken: bool | int | float | None = None


SizedBy: TypeAlias = Literal["", "the content of the batch", "values of the model"]
Averages: TypeAlias = Literal["", "classes", "elements", "rows", "divisor", "product", "inverse", "sum"]


@dataclass(frozen=True)
class Node:
    """One operation of the glue, or one call of a unit.

    Attributes:
        index: Place in the order of execution.
        name: Name of the operation, or ``@`` and the FQN of the unit.
        inputs: Indices of the values read.
        parameters: FQNs of the parameters and tracked buffers read (for a unit: all that it owns).
        reads: Values that take part as numbers (``h * scale.item()``); they are no arguments but must be there.
        outputs: Indices of the values made, those of mutated inputs included.
        written: FQNs of the parameters and tracked buffers written in place.
        aliases: Values whose memory it writes although it is not given them: it writes into a view of theirs.
        together: Earlier nodes that must run on the stage of this one: it differentiates through them.
        flops: Floating-point operations of its forward.
        moved_bytes: Bytes written by its forward.
        line: Where in the user's code it was called, ``file:line``.
        picks_rows: Whether it picks rows of the first dimension by their numbers.
        sized_by: What the size of its result depends on but shapes; empty if that is known.
        averages: What of the batch it averages over or multiplies by (``step.batch_means``); empty if nothing.
    """

    index: int
    name: str
    inputs: tuple[int, ...]
    parameters: tuple[str, ...]
    outputs: tuple[int, ...]
    written: tuple[str, ...] = ()
    aliases: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()
    together: tuple[int, ...] = ()
    flops: float = 0.0
    moved_bytes: float = 0.0
    line: str = ""
    picks_rows: bool = False
    sized_by: SizedBy = ""
    averages: Averages = ""

    @property
    def unit(self) -> str | None:
        """FQN of the unit that this node calls, or None for an operation of the glue."""
        return self.name[1:] if self.name.startswith("@") else None


@dataclass(frozen=True)
class StepGraph:
    """One recorded step.

    Attributes:
        step: Name of the step, such as ``"training_step"``.
        nodes: In the order of execution.
        values: By index.
        parameter_bytes: Size of each parameter and tracked buffer that a node reads, by FQN.
        returned: Values among the leaves of what the step returned.
        loss: The value that the backward starts from; None for steps without one.
        kept: Values that stay reachable from the module after the step.
        cloned: Values whose tensor is written in place after they were made; a portal must send a copy.
        draws: FQNs of modules that draw random numbers themselves.
        buffers: FQNs of the tracked buffers among the parameters of nodes.
        asked: Values by which it decides as if all numbers were finite.
    """

    step: str
    nodes: tuple[Node, ...]
    values: tuple[Value, ...]
    parameter_bytes: Mapping[str, int] = field(default_factory=dict)
    returned: tuple[int, ...] = ()
    loss: int | None = None
    kept: tuple[int, ...] = ()
    cloned: frozenset[int] = frozenset()
    draws: tuple[str, ...] = ()
    buffers: frozenset[str] = frozenset()
    asked: frozenset[int] = frozenset()

    def made_by(self, value: int) -> Node:
        """The operation that makes a value, or the first of those that do."""
        return next(node for node in self.nodes if value in node.outputs)

    def units(self) -> list[str]:
        """FQNs of the units called, in order of their first call."""
        return list(dict.fromkeys(node.unit for node in self.nodes if node.unit is not None))
