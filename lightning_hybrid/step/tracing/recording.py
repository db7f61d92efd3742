"""The data of a recording: the step graph, and what a replay needs of the user's containers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_hybrid.graph.step_graph import StepGraph
from lightning_hybrid.step.module_state.attribute_tensors import is_given_parameters
from lightning_hybrid.step.module_state.snapshot import Place
from lightning_hybrid.step.objects.pytree import Spec, flatten
from lightning_hybrid.step.tracing.bound_apply import BoundFunction


class StepError(ValueError):
    """A step that cannot be recorded."""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """What one leaf of a node's result is: a value, an input handed through, or a plain object."""

    value: int | None = None
    input: int | None = None
    constant: Any = None


@dataclasses.dataclass(frozen=True)
class Template:
    """How the result of a node that runs elsewhere is rebuilt.

    Attributes:
        leaves: What each leaf of its result is.
        spec: The container around them.
        written: Inputs written in place, as (place among the input leaves, the value they are afterwards).
        held: Where a unit finds further inputs on its own modules; they follow the leaves of its arguments.
        asked: What the node is asked to do, and with which sizes.
    """

    leaves: tuple[Leaf, ...]
    spec: Spec | None
    written: tuple[tuple[int, int], ...]
    held: tuple[Place, ...] = ()
    asked: tuple[Hashable, Hashable] = ((), ())


@dataclasses.dataclass(frozen=True)
class ReturnedTensor:
    """A tensor in what a step returned: its shape, and which value it is (None if it is made of the batch alone)."""

    shape: tuple[int, ...]
    value: int | None


@dataclasses.dataclass(frozen=True)
class Recording:
    """A step graph together with what replay needs of the user's containers.

    Attributes:
        graph: The graph.
        templates: One per node.
        units: The units that were one node each, by FQN.
        owned: What each unit holds, by FQN.
        kept: Where values of the step stay reachable from the modules.
        unopened: Units whose parameters were read around their forward; they should be opened.
        found_buffers: Buffers that turned out to have a home (the glue writes model values into them, or reads them
            from inside a unit); the recording is to be repeated with them tracked.
        numbers_read: Where a number was read from the model last; empty if none was.
        numbers_kept: Where a number read from the model stays after the step, and the line; empty if none does.
        values_read: The values that numbers were read from.
        looks_at: What the step looks at that may be another one in the next batch; empty if nothing is known.
        returns: What the step returned, with a ``ReturnedTensor`` in place of each tensor.
        appended: By list of its modules, the entries with values of the model that the step appends, likewise.
        kept_otherwise: The first place where it keeps something of the model in another way; empty if there is none.
        rows_kept: Where it keeps tensors made of the batch alone in another way, and their shapes.
        bound: Where the user's code keeps the ``apply`` of autograd functions.
        entered: Units that read values of the step that they were not given as tensors; they should be opened.
        left: Units that read what an earlier call of them has left on them; likewise.
    """

    graph: StepGraph
    templates: tuple[Template, ...]
    units: Mapping[str, nn.Module]
    owned: Mapping[str, tuple[str, ...]]
    kept: tuple[tuple[Place, int], ...]
    unopened: frozenset[str]
    found_buffers: frozenset[str] = frozenset()
    numbers_read: str = ""
    numbers_kept: str = ""
    values_read: tuple[int, ...] = ()
    looks_at: str = ""
    returns: Any = None
    appended: tuple[Any, ...] = ()
    kept_otherwise: str = ""
    rows_kept: tuple[tuple[Place, tuple[int, ...]], ...] = ()
    bound: Sequence[BoundFunction] = ()
    entered: frozenset[str] = frozenset()
    left: frozenset[str] = frozenset()

    def read_from_outside(self) -> dict[str, str]:
        """Parameters that other code than the unit that has them reads, or takes the place of; the line of each."""
        found: dict[str, str] = {}
        for node, template in zip(self.graph.nodes, self.templates, strict=True):
            own = self.owned[node.unit] if node.unit is not None else ()
            is_given = node.unit is not None and is_given_parameters(self.units[node.unit], template.held)
            found |= {name: node.line for name in node.parameters if is_given or name not in own}
        return found


def find_loss(result: Any) -> Any:
    """The loss in what a training step returned: itself, or its ``loss`` entry."""
    return result.get("loss") if isinstance(result, Mapping) else result


def returned_by(result: Any, mark_of: Callable[[Tensor], int | None]) -> tuple[tuple[int, ...], int | None]:
    """The values among the tensors that a step returned, each once, and the one that is the loss.

    Args:
        result: What it returned.
        mark_of: The value that a tensor is; None if it is made of the batch alone.
    """
    marks = [mark_of(leaf) for leaf in flatten(result)[0] if isinstance(leaf, Tensor)]
    loss = find_loss(result)
    return tuple(dict.fromkeys(m for m in marks if m is not None)), mark_of(loss) if isinstance(loss, Tensor) else None


def no_loss(name: str, result: Any) -> StepError:
    """The error for a step that returned ``result`` where a loss was wanted."""
    what = "a tensor" if isinstance(result, Tensor) else f"a {type(result).__name__}"
    if isinstance(result, Mapping):
        what += f" with keys {list(result)}"
    return StepError(
        f"{name} returned {what} and no loss that depends on a trainable parameter; return the loss tensor, or a dict"
        " with the key 'loss'"
    )


def pass_backward(line: str, *, is_replayed: bool) -> None:
    """A step calls ``backward()`` itself, which a recording that is only looked at passes over.

    Args:
        line: Where.
        is_replayed: Whether the recording will be replayed.

    Raises:
        StepError: It will.
    """
    if is_replayed:
        raise StepError(
            f"{line}: the step calls backward() itself, which starts from values of one stage and should end in all;"
            " add the term to the loss that the step returns, or set pipeline_parallel_size=1 and num_microbatches=1"
        )
