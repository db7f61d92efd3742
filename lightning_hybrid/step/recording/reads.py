"""Values of the model that escape a recorded step: numbers and sizes read from them, and values kept on modules.

Data-dependent sizes: operations whose result has one, and steps that read one (``loss / h[mask].shape[0]``).

The sizes are plain Python numbers, which cannot be traced. So every later operation that takes a number, or a tensor
that may have been made of one, counts as reading them, and the values are sent to the stage that runs it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torchmetrics import Metric

from lightning_hybrid.errors import StepError
from lightning_hybrid.graph.step_graph import Node, SizedBy
from lightning_hybrid.step.module_state.attributes import computed_weights
from lightning_hybrid.step.module_state.snapshots import AttributePath, ModuleSnapshot, reachable_leaves
from lightning_hybrid.step.objects.modules import modules_in
from lightning_hybrid.step.objects.names import SIZED_BY_DATA
from lightning_hybrid.step.objects.pytree import flatten, map_tensors
from lightning_hybrid.step.standins.marks import mark_in_any_run
from lightning_hybrid.step.standins.numbers import is_absent_number, line_of_read, source_values
from lightning_hybrid.step.tracing.mode import StepMode, user_line
from lightning_hybrid.step.tracing.recording import ReturnedTensor


def values_behind_numbers(leaves: list[Any], read_at: str) -> tuple[int, ...]:
    """The values from which the numbers among the arguments of an operation were read.

    ``StepError`` is raised where those behind a number are unknown; it was read at the line ``read_at``.
    """
    found = [values for leaf in leaves if (values := source_values(leaf)) is not None]
    if read_at and any(map(_has_lost_source, leaves)):
        raise StepError(
            f"{user_line()}: an operation takes a number that was computed from one read from the model ({read_at});"
            " other pipeline stages do not have it; compute it with torch functions on tensors",
            entry="number-operand",
        )
    return tuple(sorted(frozenset[int]().union(*found)))


def _has_lost_source(leaf: Any) -> bool:
    """Whether a number or array may contain one read from the model, of values that it does not tell."""
    is_number = isinstance(leaf, float | numpy.floating | numpy.ndarray)
    return is_number and source_values(leaf) is None and is_absent_number(leaf)


RETURNED = "what the step returns"


class EscapedValues(NamedTuple):
    """Values of the model that outlive a step."""

    paths: tuple[tuple[AttributePath, int], ...]  # attribute paths at which values stay reachable from the modules
    values: tuple[int, ...]  # these values, and those that numbers were read from if any of the numbers stays
    # path and line of the first such number (empty if none stays), and the values read
    numbers: tuple[str, tuple[int, ...]]
    returns: Any  # output of the step, with a ``ReturnedTensor`` in place of each tensor


def find_escaped_values(
    root: nn.Module, result: Any, watch: StepMode, without: Collection[nn.Module] = ()
) -> EscapedValues:
    """Find the paths at which values of the step, and numbers read from them, stay after it."""
    paths: list[tuple[AttributePath, int]] = []
    numbers = ""
    for location, leaf in [*reachable_leaves(root, without), *((RETURNED, leaf) for leaf in flatten(result)[0])]:
        # Also while recording, a value may be no stand-in: a layer may make it of sizes alone.
        value = watch.marks.of(leaf)
        if value is not None or isinstance(leaf, FakeTensor):
            if isinstance(location, AttributePath) and value is not None:
                paths.append((location, value))
        elif watch.numbers_read and not numbers and is_absent_number(leaf) and not of_metric(root, location):
            numbers = f"{line_of_read(leaf, watch.numbers_read)}: {location} keeps a number read from the model"
    paths += _rebound_buffers(root, watch, without)
    if paths:
        computed = computed_weights(root)
        paths = [(location, value) for location, value in paths if location not in computed]
    read = tuple(watch.values_read)
    values = dict.fromkeys((*(value for _, value in paths), *(read if numbers else ())))
    return EscapedValues(tuple(paths), tuple(values), (numbers, read), describe_tensors(result, watch))


def of_metric(root: nn.Module, location: Any) -> bool:
    """Whether an attribute is of a metric, whose states no step that is recorded changes, and one rank alone has."""
    return isinstance(location, AttributePath) and isinstance(dict(modules_in(root)).get(location.module), Metric)


def describe_tensors(value: Any, watch: StepMode) -> Any:
    """A kept or returned value with a ``ReturnedTensor`` in place of each tensor."""
    return map_tensors(lambda tensor: ReturnedTensor(tuple(tensor.shape), watch.marks.of(tensor)), value)


def number_in_buffer(root: nn.Module, before: ModuleSnapshot, without: Collection[nn.Module] = ()) -> str:
    """The FQN of a buffer that the step filled with a number of the model: ``self.spread.fill_(h.std().item())``."""
    for name, module in root.named_modules():
        for member, buffer in module._buffers.items() if module not in without else ():
            if buffer is None or isinstance(buffer, FakeTensor) or before.has_unchanged(buffer):
                continue
            if is_absent_number(buffer):
                return f"{name}.{member}" if name else member
    return ""


def refuse_number_in_buffer(root: nn.Module, before: ModuleSnapshot, read_at: str) -> None:
    """Refuse a step that is to be replayed and has written a number, read at the line ``read_at``, into a buffer."""
    if read_at and (name := number_in_buffer(root, before)):
        raise StepError(
            f"{read_at}: the step writes a number read from the model into buffer {name!r}, which other pipeline stages"
            " would not have; write the tensor itself: self.mean.copy_(h.mean())",
            entry="number-in-buffer",
        )


def _rebound_buffers(
    root: nn.Module, watch: StepMode, without: Collection[nn.Module]
) -> Iterator[tuple[AttributePath, int]]:
    """Buffers that the step has rebound to other tensors: ``self.mean = 0.9 * self.mean + 0.1 * x``."""
    for name, module in root.named_modules():
        for member, buffer in module._buffers.items() if module not in without else ():
            if buffer is not None and id(buffer) not in watch.parameters:
                value = watch.marks.of(buffer)
                if value is not None:
                    yield AttributePath(name, "_buffers", (member,)), value


def is_sized_by_data(name: str, tensors: Sequence[Tensor]) -> bool:
    """Whether the result of an operation on these arguments, in order, has a shape that depends on their content."""
    return name in SIZED_BY_DATA or (name == "__getitem__" and any(t.dtype is torch.bool for t in tensors[1:]))


class DynamicSizeReads:
    """Data-dependent sizes read during one recording."""

    def __init__(self) -> None:
        self._sized: set[int] = set()
        self._read: dict[int, None] = {}

    def record(self, node: Node) -> None:
        """Record an operation; its result may have a data-dependent size, by itself or through its inputs."""
        if node.sized_by or not self._sized.isdisjoint(node.inputs):
            self._sized.update(node.outputs)

    def record_read(self, value: int | None) -> None:
        """Record that the step reads the shape of a value; None (no value of the model) is ignored."""
        if value in self._sized:
            self._read[value] = None

    def reads_of(self, leaves: Sequence[Any], marks: Sequence[int | None], others: tuple[int, ...]) -> tuple[int, ...]:
        """The values that an operation may read besides its arguments, beside the ``others`` already known."""
        if not self._read:
            return others
        may_use_number = None in marks or any(type(leaf) in (int, float) for leaf in leaves)
        return tuple(dict.fromkeys((*others, *self._read))) if may_use_number else others


def masks_to_indices(name: str, args: Any) -> tuple[Any, SizedBy]:
    """Converts real boolean masks in an indexing call to indices; also returns what the result's size depends on."""
    sized_by: SizedBy = "values of the model" if name in SIZED_BY_DATA else ""
    if name not in ("__getitem__", "masked_select", "__setitem__") or len(args) < 2:
        return args, sized_by
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    indices: list[Any] = []
    found = False
    for entry in index:
        is_mask = isinstance(entry, Tensor) and entry.dtype in (torch.bool, torch.uint8) and entry.dim() > 0
        if is_mask and not isinstance(entry, FakeTensor) and mark_in_any_run(entry) is None:
            indices.extend(entry.nonzero(as_tuple=True))
            found = True
        else:
            indices.append(entry)
    return ((args[0], tuple(indices), *args[2:]), "the content of the batch") if found else (args, sized_by)
