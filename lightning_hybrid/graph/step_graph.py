"""The step graph: the operations of one run of a user's step, as plain data.

Values are numbered; a node reads values and parameters and makes values. A *unit* (a module that is never partitioned)
is one node. Batch-only operations, which use neither a parameter nor anything derived from one, run everywhere and
are not in the graph.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, TypeAlias

SINK = "metric:"  # prefix of the pseudo-parameters that stand for the state of a metric


@dataclass(frozen=True)
class Value:
    """One tensor of the step.

    Attributes:
        index: Number of the value; also its index in ``StepGraph.values``.
        shape: Its shape in the recorded run.
        dtype: Name of its torch dtype, such as ``"float32"``.
        stride: Its strides, in elements.
        requires_grad: Whether a gradient flows back through it.
        dynamic: Whether its shape depends on data and not on the batch's shapes alone; it then travels with a header.
        device: Its device on the rank that recorded it, such as "cpu" after ``.cpu()``; empty for the rank's device.
    """

    index: int
    shape: tuple[int, ...]
    dtype: str
    stride: tuple[int, ...]
    requires_grad: bool
    dynamic: bool = False
    device: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of its elements in the recorded run."""
        bits = re.search(r"\d+", self.dtype)  # bool has no number, and types of less than 8 bits are packed in bytes
        return math.prod(self.shape) * max(1, int(bits[0]) // 8 if bits else 1)


SizedBy: TypeAlias = Literal["", "the content of the batch", "values of the model"]
Averages: TypeAlias = Literal["", "classes", "elements", "rows", "divisor", "product", "inverse", "sum"]


@dataclass(frozen=True)
class Node:
    """One operation of the glue code, or one call of a unit.

    Attributes:
        index: Position in the order of execution.
        name: Name of the operation, or ``@`` and the FQN of the unit.
        inputs: Indices of the values read.
        parameters: FQNs of the parameters and tracked buffers read (for a unit: all that it has).
        reads: Values used as Python numbers (``h * scale.item()``); they are no arguments but must be available.
        outputs: Indices of the values made, those of mutated inputs included.
        written: FQNs of the parameters and tracked buffers written in place.
        aliases: Values that are no inputs but whose memory it writes, through a view.
        together: Earlier nodes that must run on the stage of this one, as it differentiates through them.
        flops: Floating-point operations of its forward.
        step_flops: Those of its forward and of its backward, without recomputation.
        moved_bytes: Bytes written by its forward.
        saved_bytes: Bytes that it saves for its backward, without values of the graph.
        saved_values: Values that it saves for its backward; of several that share memory, the first.
        line: Position in user code, ``file:line``.
        selects_rows: Whether it selects rows of the first dimension by their indices.
        sized_by: Source of its result's size besides shapes; empty if shapes determine it.
        averages: Kind of average over the batch, or of a factor of it (``batch.means``); empty if none.
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
    step_flops: float = 0.0
    moved_bytes: float = 0.0
    saved_bytes: int = 0
    saved_values: tuple[int, ...] = ()
    line: str = ""
    selects_rows: bool = False
    sized_by: SizedBy = ""
    averages: Averages = ""

    @property
    def unit(self) -> str | None:
        """FQN of the unit that this node calls, or None for an operation of the glue code."""
        return self.name[1:] if self.name.startswith("@") else None


@dataclass(frozen=True)
class StepGraph:
    """The graph of one recorded step.

    Attributes:
        step: Name of the step, such as ``"training_step"``.
        nodes: In the order of execution.
        values: By index.
        parameter_bytes: Size of each parameter and tracked buffer that a node reads, by FQN.
        returned: Values among the leaves of the step's return value.
        loss: The value that the backward starts from; None for steps without one.
        kept: Values that stay reachable from the module after the step.
        cloned: Values whose tensor is written in place after they were made; a portal must send a copy.
        draws: FQNs of modules that draw random numbers themselves.
        buffers: FQNs of the tracked buffers among the parameters of nodes.
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

    @cached_property
    def makers(self) -> Mapping[int, Node]:
        """The operation that makes each value, or the first one if several do."""
        return {output: node for node in reversed(self.nodes) for output in node.outputs}

    @cached_property
    def of_units(self) -> frozenset[int]:
        """The values that depend on the result of a unit, and so on the samples."""
        found: set[int] = set()
        for node in self.nodes:
            if node.unit is not None or not found.isdisjoint(node.inputs):
                found.update(value for value in node.outputs if self.makers[value] is node)
        return frozenset(found)

    @cached_property
    def operations(self) -> list[tuple[str, tuple[int, ...]]]:
        """The name and the inputs of each operation: what two runs of a step have in common."""
        return [(node.name, node.inputs) for node in self.nodes]

    def made_by(self, value: int) -> Node:
        """The operation that makes a value, or the first one if several do."""
        return self.makers[value]

    def units(self) -> list[str]:
        """FQNs of the units called, in order of their first call."""
        return list(dict.fromkeys(node.unit for node in self.nodes if node.unit is not None))
