"""The step graph: the operations of one run of a user's step, as plain data.

Values are numbered; a node reads values and parameters and makes values. A *unit* (a module that is never partitioned)
is one node. Batch-only operations, which use neither a parameter nor anything derived from one, run everywhere and
are not in the graph.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, TypeAlias

# Operations whose result has all elements of their inputs, in another shape or order.
REARRANGED = frozenset(
    {"stack", "cat", "view", "reshape", "flatten", "unflatten", "ravel", "squeeze", "unsqueeze", "t", "transpose"}
    | {"permute", "get_T", "get_mT"}
)
# Operations on two matrices of rows whose result has an element for each pair of these.
_OF_PAIRS = frozenset({"matmul", "__matmul__", "__rmatmul__", "mm", "cdist"})
SINK = "metric:"  # prefix of the pseudo-parameters that stand for the state of a metric


@dataclass(frozen=True)
class Value:
    """One tensor of the step."""

    index: int  # number of the value; also its index in ``StepGraph.values``
    shape: tuple[int, ...]  # its shape in the recorded run
    dtype: str  # name of its torch dtype, such as ``"float32"``
    stride: tuple[int, ...]  # its strides, in elements
    requires_grad: bool  # whether a gradient flows back through it
    # whether its shape depends on data and not on the batch's shapes alone; it then travels with a header
    dynamic: bool = False
    # its device on the rank that recorded it, such as "cpu" after ``.cpu()``; empty for the rank's device
    device: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of its elements in the recorded run."""
        bits = re.search(r"\d+", self.dtype)  # bool has no number, and types of less than 8 bits are packed in bytes
        return math.prod(self.shape) * max(1, int(bits[0]) // 8 if bits else 1)


SizedBy: TypeAlias = Literal["", "the content of the batch", "values of the model"]
Averages: TypeAlias = Literal["", "classes", "weighted", "elements", "rows", "divisor", "product", "inverse", "sum"]


@dataclass(frozen=True)
class Node:
    """One operation of the glue code, or one call of a unit."""

    index: int  # position in the order of execution
    name: str  # name of the operation, or ``@`` and the FQN of the unit
    inputs: tuple[int, ...]  # indices of the values read
    parameters: tuple[str, ...]  # FQNs of the parameters and tracked buffers read (for a unit: all that it has)
    outputs: tuple[int, ...]  # indices of the values made, those of mutated inputs included
    written: tuple[str, ...] = ()  # FQNs of the parameters and tracked buffers written in place
    aliases: tuple[int, ...] = ()  # values that are no inputs but whose memory it writes, through a view
    # values used as Python numbers (``h * scale.item()``); they are no arguments but must be available
    reads: tuple[int, ...] = ()
    # earlier nodes that must run on the stage of this one, as it differentiates through them
    together: tuple[int, ...] = ()
    flops: float = 0.0  # floating-point operations of its forward
    step_flops: float = 0.0  # those of its forward and of its backward, without recomputation
    repeated_flops: float = 0.0  # those of its forward that checkpoints of the user's code run again in the backward
    moved_bytes: float = 0.0  # bytes written by its forward
    saved_bytes: int = 0  # bytes that it saves for its backward, without values of the graph
    saved_values: tuple[int, ...] = ()  # values that it saves for its backward; of several that share memory, the first
    line: str = ""  # position in user code, ``file:line``
    selects_rows: bool = False  # whether it selects rows of the first dimension by their indices
    sized_by: SizedBy = ""  # source of its result's size besides shapes; empty if shapes determine it
    averages: Averages = ""  # kind of average over the batch, or of a factor of it (``batch.means``); empty if none

    @property
    def unit(self) -> str:
        """FQN of the unit that this node calls; empty for an operation of the glue code."""
        return self.name[1:] if self.name.startswith("@") else ""


@dataclass(frozen=True)
class StepGraph:
    """The graph of one recorded step."""

    step: str  # name of the step, such as ``"training_step"``
    nodes: tuple[Node, ...]  # in the order of execution
    values: tuple[Value, ...]  # by index
    # size of each parameter and tracked buffer that a node reads, by FQN
    parameter_bytes: Mapping[str, int] = field(default_factory=dict)
    returned: tuple[int, ...] = ()  # values among the leaves of the step's return value
    loss: int | None = None  # the value that the backward starts from; None for steps without one
    kept: tuple[int, ...] = ()  # values that stay reachable from the module after the step
    # values whose tensor is written in place after they were made; a portal must send a copy
    cloned: frozenset[int] = frozenset()
    draws: tuple[str, ...] = ()  # FQNs of modules that draw random numbers themselves
    buffers: frozenset[str] = frozenset()  # FQNs of the tracked buffers among the parameters of nodes

    @cached_property
    def makers(self) -> Mapping[int, Node]:
        """The operation that makes each value, or the first one if several do."""
        return {output: node for node in reversed(self.nodes) for output in node.outputs}

    @cached_property
    def of_samples(self) -> frozenset[int]:
        """The values with rows of samples: the results of units, and what operations make of these row by row.

        A stack of losses is none, nor is a mean over the rows; where shapes leave it open, the rows are taken as kept.
        """
        found: set[int] = set()
        for node in self.nodes:
            for made in node.outputs:
                if self.values[made].shape and self.makers[made] is node and self._has_rows(node, made, found):
                    found.add(made)
        return frozenset(found)

    def _has_rows(self, node: Node, made: int, of_samples: Set[int]) -> bool:
        """Whether a result has rows of samples, if these inputs have."""
        if node.unit:
            return True
        if node.name in REARRANGED:
            return bool(node.inputs) and all(one in of_samples for one in node.inputs)
        value = self.values[made]
        given = [self.values[one].shape for one in node.inputs if one in of_samples]
        rest = value.shape[1:]
        return any(value.dynamic or value.shape[0] == each[0] or rest == each[1:] != () for each in given)

    @cached_property
    def mixed(self) -> frozenset[int]:
        """The values with rows of samples that depend on other samples too: on a mean over the batch, or all pairs."""
        found: set[int] = set()
        reduced: set[int] = set()  # values that depend on samples and have no rows of them
        for node in self.nodes:
            given = set(node.inputs)
            has_rows = given <= self.of_samples and all(len(self.values[one].shape) == 2 for one in given)
            is_mixed = bool(given & found) or (not node.unit and bool(given & reduced))
            is_mixed |= node.name in _OF_PAIRS and len(node.inputs) > 1 and has_rows
            if is_mixed:
                found |= self.of_samples.intersection(node.outputs)
            if given & (self.of_samples | reduced):
                reduced |= set(node.outputs) - self.of_samples
        return frozenset(found)

    def dependents(self, nodes: Set[int]) -> frozenset[int]:
        """The values that depend on the results of some nodes, these included."""
        found: set[int] = set()
        for node in self.nodes:
            if node.index in nodes or not found.isdisjoint((*node.inputs, *node.reads)):
                found.update(node.outputs)
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
        return list(dict.fromkeys(node.unit for node in self.nodes if node.unit))
