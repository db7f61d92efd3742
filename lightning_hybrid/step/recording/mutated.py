"""Batch tensors that the step mutates with values of the model: they are replaced by absent stand-ins."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_hybrid.errors import StepError
from lightning_hybrid.step.objects.tensors import storage_id
from lightning_hybrid.step.standins.marks import Marks, unmark
from lightning_hybrid.step.standins.tensors import make_absent, swap_in_place
from lightning_hybrid.step.tracing.functions import COLLECTIVE, collective_outputs
from lightning_hybrid.step.tracing.mode import user_line

_IN_PLACE = ("setitem", "iadd", "isub", "imul", "itruediv", "ipow", "iand", "ior", "ixor")
_WRITES = frozenset({*(f"__{name}__" for name in _IN_PLACE), "__set__"})  # of `tensor.data`
_NORMS = frozenset({"batch_norm", "instance_norm"})
_ARGUMENTS_OF_KERNEL = 9  # torch.batch_norm takes all of its arguments; those of torch.nn.functional are fewer


class BufferInfo(NamedTuple):
    """A buffer of the user's module."""

    name: str  # its FQN
    inside: bool  # whether it is inside a unit
    memory: int  # key of its storage (``storage_id``)


def buffers_of(root: nn.Module, units: Mapping[str, nn.Module]) -> dict[int, BufferInfo]:
    """The buffers of a module, by their id."""
    inside = {id(buffer) for unit in units.values() for buffer in unit.buffers()}
    return {id(b): BufferInfo(name, id(b) in inside, storage_id(b)) for name, b in root.named_buffers()}


class MutatedBatchTensors:
    """Batch tensors and buffers that became absent in one recording.

    Attributes:
        buffers: FQNs of the buffers among them.
    """

    def __init__(self, buffers: Mapping[int, BufferInfo], marks: Marks) -> None:
        """Take the result of ``buffers_of``, and the marks of the recording."""
        self.buffers: set[str] = set()
        self._names = {buffer.memory: buffer.name for buffer in buffers.values()}
        self._marks = marks
        self._swapped: list[tuple[Tensor, Tensor]] = []
        self._detached: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}  # by id: (base, result)

    def record_detached(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        """Record an operation on the batch alone whose result shares the memory of its argument."""
        if name in ("get_data", "detach") and isinstance(result, Tensor):
            self._detached[id(result)] = weakref.ref(args[0]), result

    def make_targets_absent(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Make absent the batch tensors that an operation on values of the model is about to write.

        ``StepError`` is raised where it writes into a view, whose base would not change.
        """
        target = kwargs.get("out")
        if target is None and args and (name in _WRITES or (name.endswith("_") and not name.endswith("__"))):
            target = args[0]
        targets = collective_outputs(name, args, kwargs) if name.startswith(COLLECTIVE) else [target]
        for tensor in (*targets, *written_statistics(name, args, kwargs)):
            self._make_absent(name, tensor)

    def _make_absent(self, name: str, target: Any) -> None:
        if not isinstance(target, Tensor) or isinstance(target, FakeTensor) or target in self._marks:
            return
        memory = storage_id(target)
        if memory in self._names:  # a buffer, or a view of one: recorded again as tracked, with an owner stage
            self.buffers.add(self._names[memory])
        elif target._is_view() or (id(target) in self._detached and self._detached[id(target)][0]() is not None):
            raise StepError(
                f"{user_line()}: {name} writes a value of the model into a view of a tensor made from the batch;"
                " write into the tensor itself (x[index] = value)",
                entry="batch-view",
            )
        absent = make_absent(target)
        swap_in_place(target, absent)
        self._swapped.append((target, absent))

    def undo(self) -> None:
        """Give the tensors their content back."""
        for target, content in reversed(self._swapped):
            unmark(target)
            target.__class__ = content.__class__
            torch._C._swap_tensor_impl(target, content)


def written_statistics(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The running statistics of shape (channels,) that a norm writes; the kernel does not bump their versions."""
    if name not in _NORMS:
        return []
    first = 3 if len(args) >= _ARGUMENTS_OF_KERNEL else 1
    flag = "training" if name == "batch_norm" or first == 3 else "use_input_stats"
    padded = [*args, *[None] * _ARGUMENTS_OF_KERNEL]
    trains = args[5] if len(args) > 5 else kwargs.get(flag, flag == "use_input_stats")
    statistics = (padded[first], padded[first + 1], kwargs.get("running_mean"), kwargs.get("running_var"))
    return [tensor for tensor in statistics if isinstance(tensor, Tensor)] if trains else []
