"""The data of a recording: the step graph, and what a replay needs of the user's containers."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from typing import Any

from torch import nn

from lightning_hybrid.graph.step_graph import StepGraph
from lightning_hybrid.step.module_state.attributes import replaces_parameters
from lightning_hybrid.step.module_state.snapshots import AttributePath
from lightning_hybrid.step.objects.pytree import Spec, flatten
from lightning_hybrid.step.standins.marks import Marks


@dataclasses.dataclass(frozen=True)
class Leaf:
    """Describes one leaf of a node's result: index of a value, index of an input returned as is, or a constant."""

    value: int | None = None
    input: int | None = None
    constant: Any = None


@dataclasses.dataclass(frozen=True)
class Template:
    """Describes the result of a node, so that ranks that do not run the node can rebuild it."""

    leaves: tuple[Leaf, ...]  # the leaves of the result
    spec: Spec | None  # the container around them
    written: tuple[tuple[int, int], ...]  # inputs written in place, as (index among the input leaves, value afterwards)
    # paths of inputs that a unit reads from its own modules; they follow those of its arguments
    attribute_inputs: tuple[AttributePath, ...] = ()
    signature: tuple[Hashable, Hashable] = ((), ())  # the op signature of the node, and its sizes


@dataclasses.dataclass(frozen=True)
class ReturnedTensor:
    """A tensor that a step returned: its shape, and its value's index (None if computed from the batch alone)."""

    shape: tuple[int, ...]
    value: int | None


@dataclasses.dataclass(frozen=True)
class Recording:
    """A step graph together with what replay needs of the user's containers.

    Attributes:
        graph: The graph.
        templates: One per node.
        units: The units that are one node each, by FQN.
        owned: FQNs of the parameters that each unit owns, by FQN of the unit.
        kept: Values that stay reachable from the modules after the step, and their paths.
        unopened: Units whose parameters are read outside of their forward; they should be opened.
        found_buffers: Buffers found to need an owner stage (the glue writes model values into them, or reads them
            from inside a unit); the recording is to be repeated with them tracked.
        numbers_read: The line of the last read of a number from the model; empty if there is none.
        numbers_kept: Path and line of a number read from the model that stays after the step; empty if there is none.
        values_read: The values that numbers were read from.
        unguarded_state: State read by the step that may differ in the next batch; empty if none is known.
        returns: The step's result, with a ``ReturnedTensor`` in place of each tensor.
        appended: By list of its modules, the entries with values of the model that the step appends, likewise.
        kept_elsewhere: The first path that stores a value of the model other than by appending; empty if none does.
        kept_batch_tensors: Paths that store tensors of the batch alone other than by appending, and their shapes.
        entered: Units with captured inputs: values of the step that are no tensor arguments; they should be opened.
        left: Units that read values which an earlier call stored on them; they should be opened too.
        has_guesses: Whether code of the step read a value of the model that was guessed.
        has_functions: Whether an autograd function of user code was applied, also inside of units.
        has_hooks: Whether a hook on the gradient of a tensor was registered.
        written: FQNs of the buffers of units that it writes, without averages of BatchNorm.
        logged: What it logs beside values of its graph and metrics: the name, and the number; NaN for a number read
            from the model and for a tensor of the batch, None for what is no number.
    """

    graph: StepGraph
    templates: tuple[Template, ...]
    units: Mapping[str, nn.Module]
    owned: Mapping[str, tuple[str, ...]]
    kept: tuple[tuple[AttributePath, int], ...]
    unopened: frozenset[str]
    found_buffers: frozenset[str] = frozenset()
    numbers_read: str = ""
    numbers_kept: str = ""
    values_read: tuple[int, ...] = ()
    unguarded_state: str = ""
    returns: Any = None
    appended: tuple[Any, ...] = ()
    kept_elsewhere: str = ""
    kept_batch_tensors: tuple[tuple[AttributePath, tuple[int, ...]], ...] = ()
    entered: frozenset[str] = frozenset()
    left: frozenset[str] = frozenset()
    has_guesses: bool = False
    has_functions: bool = False
    has_hooks: bool = False
    written: frozenset[str] = frozenset()
    logged: tuple[tuple[str, float | None], ...] = ()

    def parameters_read_outside(self) -> dict[str, str]:
        """The parameters that code outside of their unit reads or replaces, and the line of each."""
        found: dict[str, str] = {}
        for node, template in zip(self.graph.nodes, self.templates, strict=True):
            owned = self.owned[node.unit] if node.unit else ()
            is_replaced = node.unit and replaces_parameters(self.units[node.unit], template.attribute_inputs)
            found |= {name: node.line for name in node.parameters if is_replaced or name not in owned}
        return found


def find_loss(result: Any) -> Any:
    """The loss in the result of a training step: the result itself, or its ``loss`` entry."""
    return result.get("loss") if isinstance(result, Mapping) else result


def returned_values(result: Any, marks: Marks) -> tuple[tuple[int, ...], int | None]:
    """The indices of the values in a step's result, each once, and the index of the loss."""
    return marks.among(flatten(result)[0]), marks.of(find_loss(result))
