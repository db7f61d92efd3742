"""Values of the model that escape a recorded step: numbers read from them, and values kept on modules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from math import isnan  # the function itself: a step asks another
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_hybrid.step.module_state.computed_weights import computed_weights
from lightning_hybrid.step.module_state.snapshot import AttributePath, ModuleSnapshot, reachable_leaves
from lightning_hybrid.step.objects.pytree import flatten, map_leaves
from lightning_hybrid.step.standins.absent_arrays import AbsentArray
from lightning_hybrid.step.standins.absent_tensors import AbsentFloat, ControlFlowError, branch_message, source_values
from lightning_hybrid.step.tracing.intercept_step_operations import StepMode, user_line
from lightning_hybrid.step.tracing.recording import Recording, ReturnedTensor, StepError


def values_behind_numbers(leaves: list[Any], read_at: str) -> tuple[int, ...]:
    """The values from which the numbers among the arguments of an operation were read.

    Args:
        leaves: Leaves of its arguments.
        read_at: Line at which a number was read last; empty if none was.

    Raises:
        StepError: The values behind a number are unknown.
    """
    found = [values for leaf in leaves if (values := source_values(leaf)) is not None]
    lost = [leaf for leaf in leaves if type(leaf) is float and isnan(leaf) and source_values(leaf) is None]
    if read_at and lost:
        raise StepError(
            f"{user_line()}: an operation takes a number that was computed from one read from the model ({read_at});"
            " other pipeline stages do not have it: compute it with torch functions on tensors"
        )
    return tuple(sorted(frozenset[int]().union(*found)))


# Moderate, so that their exponentials are finite too.
_PROBES = (300.0, -300.0)


class BranchCheck:
    """Finds branches on numbers read from the model that became plain floats, which Python does not report.

    A step that branches on ``float(loss) > 2`` would compare a NaN where the loss is absent. So a step that reads
    numbers is recorded again with other numbers in their place, and must run the same operations.
    """

    def __init__(self, root: nn.Module, step: Callable[[], Any]) -> None:
        self._root = root
        self._step = step
        self._plain: dict[AttributePath, Any] = {}
        self._floats: dict[AttributePath, float] = {}

    def step(self) -> Any:
        """Run the user's step, and record the plain attributes after it."""
        result = self._step()
        leaves = dict(reachable_leaves(self._root))
        self._plain = {location: leaf for location, leaf in leaves.items() if type(leaf) in (bool, int, str)}
        self._floats = {location: leaf for location, leaf in leaves.items() if type(leaf) is float and not isnan(leaf)}
        return result

    def check(
        self,
        recording: Recording,
        record_again: Callable[[float], Recording],
        context: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """Compare a recording with others in which the numbers read are different.

        Args:
            recording: Recording of ``step``.
            record_again: Records ``step`` again, with a number in place of those read from absent values.
            context: Context of the step, entered to raise an error.

        Raises:
            ControlFlowError: The step runs other operations when the numbers differ.
        """
        if not recording.numbers_read:
            return
        plain, floats = self._plain, self._floats
        for probe in _PROBES:
            other = self._recorded(record_again, probe)
            if other is None:
                continue
            same = operations(other) == operations(recording) and self._plain == plain
            if not same or (self._float_changed(floats) and self._float_changes_again(record_again, probe)):
                with context():
                    raise ControlFlowError(branch_message(recording.numbers_read))

    def _recorded(self, record_again: Callable[[float], Recording], probe: float) -> Recording | None:
        try:
            return record_again(probe)
        except (StepError, ArithmeticError, ValueError):
            return None  # the probe is no valid number here: math.log(loss.item())

    def _float_changed(self, floats: dict[AttributePath, float]) -> bool:
        """Whether a float attribute changed that is none of the numbers read: `max(self.best, float(loss))`."""
        return any(location not in self._floats or self._floats[location] != leaf for location, leaf in floats.items())

    def _float_changes_again(self, record_again: Callable[[float], Recording], probe: float) -> bool:
        """Whether it changed because of the probe; a kept time changes in each run."""
        floats = self._floats
        return self._recorded(record_again, probe) is not None and not self._float_changed(floats)


def operations(recording: Recording) -> list[tuple[str, tuple[int, ...]]]:
    """The operations of a step, each with the values that it reads."""
    return [(node.name, node.inputs) for node in recording.graph.nodes]


RETURNED = "what the step returns"


class EscapedValues(NamedTuple):
    """Values of the model that outlive a step.

    Attributes:
        paths: Attribute paths at which values stay reachable from the modules.
        values: These values, and those that numbers were read from if any of the numbers stays.
        numbers: Path and line of the first such number (empty if none stays), and the values read.
        returns: Output of the step, with a ``ReturnedTensor`` in place of each tensor.
    """

    paths: tuple[tuple[AttributePath, int], ...]
    values: tuple[int, ...]
    numbers: tuple[str, tuple[int, ...]]
    returns: Any


def find_escaped_values(
    root: nn.Module, result: Any, watch: StepMode, without: Collection[nn.Module] = ()
) -> EscapedValues:
    """Find the paths at which values of the step, and numbers read from them, stay after it.

    Args:
        root: The user's module, after the step.
        result: Output of the step.
        watch: The function mode of the recording.
        without: Modules to skip.
    """

    def described(leaf: Any) -> Any:
        return ReturnedTensor(tuple(leaf.shape), watch.mark_of(leaf)) if isinstance(leaf, Tensor) else leaf

    paths: list[tuple[AttributePath, int]] = []
    numbers = ""
    for location, leaf in [*reachable_leaves(root, without), *((RETURNED, leaf) for leaf in flatten(result)[0])]:
        # Also while recording, a value may be no stand-in: a layer may make it of sizes alone.
        value = watch.mark_of(leaf) if isinstance(leaf, Tensor) else None
        if value is not None or isinstance(leaf, FakeTensor):
            if isinstance(location, AttributePath) and value is not None:
                paths.append((location, value))
        elif watch.numbers_read and not numbers and is_absent_number(leaf):
            line = leaf.line if isinstance(leaf, AbsentFloat | AbsentArray) else watch.numbers_read
            numbers = f"{line}: {location} keeps a number read from the model"
    paths += _rebound_buffers(root, watch, without)
    if paths:
        computed = computed_weights(root)
        paths = [(location, value) for location, value in paths if location not in computed]
    read = watch.values_to_report()
    values = dict.fromkeys((*(value for _, value in paths), *(read if numbers else ())))
    return EscapedValues(tuple(paths), tuple(values), (numbers, read), map_leaves(described, result))


def number_in_buffer(root: nn.Module, before: ModuleSnapshot, without: Collection[nn.Module] = ()) -> str:
    """The FQN of a buffer that the step filled with a number of the model: ``self.spread.fill_(h.std().item())``.

    Args:
        root: The user's module, after the step.
        before: Its state before the step.
        without: Modules to skip.
    """
    for name, module in root.named_modules():
        for member, buffer in module._buffers.items() if module not in without else ():
            if buffer is None or isinstance(buffer, FakeTensor) or before.has_unchanged(buffer):
                continue
            if is_absent_number(buffer):
                return f"{name}.{member}" if name else member
    return ""


def refuse_number_in_buffer(root: nn.Module, before: ModuleSnapshot, read_at: str) -> None:
    """Check that a step that is to be replayed has written no number read from the model into a buffer.

    Args:
        root: The user's module, after the step.
        before: Its state before the step.
        read_at: Line at which a number was read last; empty if none was.

    Raises:
        StepError: It has; other pipeline stages do not have the number.
    """
    if read_at and (name := number_in_buffer(root, before)):
        raise StepError(
            f"{read_at}: the step writes a number read from the model into buffer {name!r}, which other pipeline stages"
            " would not have; write the tensor itself: self.mean.copy_(h.mean())"
        )


def _rebound_buffers(
    root: nn.Module, watch: StepMode, without: Collection[nn.Module]
) -> Iterator[tuple[AttributePath, int]]:
    """Buffers that the step has rebound to other tensors: ``self.mean = 0.9 * self.mean + 0.1 * x``."""
    for name, module in root.named_modules():
        for member, buffer in module._buffers.items() if module not in without else ():
            if buffer is not None and id(buffer) not in watch.parameters:
                value = watch.mark_of(buffer)
                if value is not None:
                    yield AttributePath(name, "_buffers", (member,)), value


def is_absent_number(leaf: Any) -> bool:
    """Whether a leaf was read from an absent tensor, or computed from such a number: it is, or contains, a NaN."""
    if isinstance(leaf, float | numpy.floating):
        return isnan(leaf)
    if isinstance(leaf, numpy.ndarray):
        return leaf.dtype.kind == "f" and bool((leaf != leaf).any())
    if isinstance(leaf, Tensor):
        return leaf.is_floating_point() and leaf.layout is torch.strided and bool(leaf.isnan().any())
    return isinstance(leaf, AbsentArray)
