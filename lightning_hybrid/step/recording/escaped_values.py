"""Values of the model that leave a recorded step: numbers read from them, and values kept on modules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from math import isnan  # the function itself: a step asks another
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_hybrid.step.module_state.attribute_tensors import computed_weights
from lightning_hybrid.step.module_state.snapshot import ModuleState, Place, reachable
from lightning_hybrid.step.objects.pytree import flatten, map_leaves
from lightning_hybrid.step.standins.absent_arrays import AbsentArray
from lightning_hybrid.step.standins.absent_tensors import AbsentFloat, ControlFlowError, branch_message, values_behind
from lightning_hybrid.step.tracing.recording import Recording, ReturnedTensor, StepError
from lightning_hybrid.step.tracing.step_mode import StepWatch, user_line


def numbers_among(leaves: list[Any], read_at: str) -> tuple[int, ...]:
    """The values behind the numbers that an operation is given.

    Args:
        leaves: Of its arguments.
        read_at: Where a number was read last; empty if none was.

    Raises:
        StepError: It cannot be known which values are behind a number.
    """
    known = [values for leaf in leaves if (values := values_behind(leaf)) is not None]
    lost = [leaf for leaf in leaves if type(leaf) is float and isnan(leaf) and values_behind(leaf) is None]
    if read_at and lost:
        raise StepError(
            f"{user_line()}: an operation is given a number that was computed from one read from the model ({read_at});"
            " other pipeline stages do not have it: compute it with torch functions on tensors"
        )
    return tuple(sorted(frozenset[int]().union(*known)))


# Moderate, so that their exponentials are numbers too.
_PROBES = (300.0, -300.0)


class BranchCheck:
    """Finds branches on numbers read from the model, which Python lets pass once they are plain floats.

    A step that decides by ``float(loss) > 2`` would decide by a NaN where the loss is absent. So a step that reads
    numbers is recorded again with other numbers in their place, and must do the same.
    """

    def __init__(self, root: nn.Module, step: Callable[[], Any]) -> None:
        """Args: root: the user's module. step: runs its step."""
        self._root = root
        self._step = step
        self._plain: dict[Place, Any] = {}
        self._floats: dict[Place, float] = {}

    def step(self) -> Any:
        """The user's step, and what it leaves behind in plain attributes."""
        result = self._step()
        leaves = dict(reachable(self._root))
        self._plain = {place: leaf for place, leaf in leaves.items() if type(leaf) in (bool, int, str)}
        self._floats = {place: leaf for place, leaf in leaves.items() if type(leaf) is float and not isnan(leaf)}
        return result

    def check(
        self,
        recording: Recording,
        record_again: Callable[[], Recording],
        context: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """Compare a recording with others in which the numbers are not the same.

        Args:
            recording: Of ``step``.
            record_again: Records ``step`` again.
            context: Of the step; its errors pass through it.

        Raises:
            ControlFlowError: The step does something else when the numbers are others.
        """
        if not recording.numbers_read:
            return
        plain, floats = self._plain, self._floats
        for probe in _PROBES:
            other = self._recorded(record_again, probe)
            if other is None:
                continue
            same = operations(other) == operations(recording)
            if not same or self._plain != plain or (self._moved(floats) and self._moved_again(record_again, probe)):
                with context():
                    raise ControlFlowError(branch_message(recording.numbers_read))

    def _recorded(self, record_again: Callable[[], Recording], probe: float) -> Recording | None:
        StepWatch.reads_as = probe
        try:
            return record_again()
        except (StepError, ArithmeticError, ValueError):
            return None  # the number cannot be this one: math.log(loss.item())
        finally:
            StepWatch.reads_as = None

    def _moved(self, floats: dict[Place, float]) -> bool:
        """Whether a float is another one that was none of the numbers read: `max(self.best, float(loss))`."""
        return any(place not in self._floats or self._floats[place] != leaf for place, leaf in floats.items())

    def _moved_again(self, record_again: Callable[[], Recording], probe: float) -> bool:
        """Whether it is so because of the numbers; a time that is kept is another one each time."""
        floats = self._floats
        return self._recorded(record_again, probe) is not None and not self._moved(floats)


def operations(recording: Recording) -> list[tuple[str, tuple[int, ...]]]:
    """What the step does: each operation and the values that it is given."""
    return [(node.name, node.inputs) for node in recording.graph.nodes]


RETURNED = "what the step returns"


class Kept(NamedTuple):
    """What a step leaves behind of the model.

    Attributes:
        places: Where values stay reachable from the modules.
        values: These, and those that numbers were read from if any of the numbers stays.
        numbers: Where the first such number stays and its line (empty if none does), and the values read.
        returns: What the step returned, without its tensors.
    """

    places: tuple[tuple[Place, int], ...]
    values: tuple[int, ...]
    numbers: tuple[str, tuple[int, ...]]
    returns: Any


def find_kept(root: nn.Module, result: Any, watch: StepWatch, without: Collection[nn.Module] = ()) -> Kept:
    """Where values of the step, and numbers read from them, stay after it.

    Args:
        root: The user's module, as the step left it.
        result: What the step returned.
        watch: Of the recording.
        without: Modules to pass over.
    """

    def described(leaf: Any) -> Any:
        return ReturnedTensor(tuple(leaf.shape), watch.mark_of(leaf)) if isinstance(leaf, Tensor) else leaf

    places: list[tuple[Place, int]] = []
    numbers = ""
    for place, leaf in [*reachable(root, without), *((RETURNED, leaf) for leaf in flatten(result)[0])]:
        # A value need be no stand-in while a step is recorded: a layer may make it of sizes alone.
        value = watch.mark_of(leaf) if isinstance(leaf, Tensor) else None
        if value is not None or isinstance(leaf, FakeTensor):
            if isinstance(place, Place) and value is not None:
                places.append((place, value))
        elif watch.numbers_read and not numbers and is_absent_number(leaf):
            line = leaf.line if isinstance(leaf, AbsentFloat | AbsentArray) else watch.numbers_read
            numbers = f"{line}: {place} keeps a number read from the model"
    places += _rebound_buffers(root, watch, without)
    if places:
        computed = computed_weights(root)
        places = [(place, value) for place, value in places if place not in computed]
    read = watch.values_told()
    values = dict.fromkeys((*(value for _, value in places), *(read if numbers else ())))
    return Kept(tuple(places), tuple(values), (numbers, read), map_leaves(described, result))


def number_in_buffer(root: nn.Module, before: ModuleState, without: Collection[nn.Module] = ()) -> str:
    """The FQN of a buffer that was given a number read from the model: ``self.spread.fill_(h.std().item())``.

    Args:
        root: The user's module, as the step left it.
        before: What it held before the step.
        without: Modules to pass over.
    """
    for name, module in root.named_modules():
        for member, buffer in module._buffers.items() if module not in without else ():
            if buffer is None or isinstance(buffer, FakeTensor) or before.holds(buffer):
                continue
            if is_absent_number(buffer):
                return f"{name}.{member}" if name else member
    return ""


def refuse_number_in_buffer(root: nn.Module, before: ModuleState, read_at: str) -> None:
    """See that a step that is to be replayed has written no number read from the model into a buffer.

    Args:
        root: The user's module, as the step left it.
        before: What it held before the step.
        read_at: Where a number was read last; empty if none was.

    Raises:
        StepError: It has; other pipeline stages do not have the number.
    """
    if read_at and (name := number_in_buffer(root, before)):
        raise StepError(
            f"{read_at}: the step writes a number read from the model into buffer {name!r}, which other pipeline stages"
            " would not have; write the tensor itself: self.mean.copy_(h.mean())"
        )


def _rebound_buffers(root: nn.Module, watch: StepWatch, without: Collection[nn.Module]) -> Iterator[tuple[Place, int]]:
    """Buffers that the step has made other tensors: ``self.mean = 0.9 * self.mean + 0.1 * x``."""
    for name, module in root.named_modules():
        for member, buffer in module._buffers.items() if module not in without else ():
            if buffer is not None and id(buffer) not in watch.parameters:
                value = watch.mark_of(buffer)
                if value is not None:
                    yield Place(name, "_buffers", (member,)), value


def is_absent_number(leaf: Any) -> bool:
    """Whether a leaf was read from an absent tensor, or computed from what was: then it is, or holds, a NaN."""
    if isinstance(leaf, float | numpy.floating):
        return isnan(leaf)
    if isinstance(leaf, numpy.ndarray):
        return leaf.dtype.kind == "f" and bool((leaf != leaf).any())
    if isinstance(leaf, Tensor):
        return leaf.is_floating_point() and leaf.layout is torch.strided and bool(leaf.isnan().any())
    return isinstance(leaf, AbsentArray)
