"""Data-dependent sizes: operations whose result has one, and steps that read one (``loss / h[mask].shape[0]``).

The sizes are plain Python numbers, which cannot be traced. So every later operation that takes a number, or a tensor
that may have been made of one, counts as reading them, and the values are sent to the stage that runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lightning_hybrid.graph.step_graph import Node, SizedBy
from lightning_hybrid.step.objects.op_names import SIZED_BY_DATA
from lightning_hybrid.step.standins.absent_tensors import MARK


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
        """The values that an operation may read besides its arguments.

        Args:
            leaves: Leaves of its arguments.
            marks: The value index of each tensor among them; None for a tensor of the batch or a parameter.
            others: Values that it is already recorded to read.
        """
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
        if is_mask and not isinstance(entry, FakeTensor) and getattr(entry, MARK, None) is None:
            indices.extend(entry.nonzero(as_tuple=True))
            found = True
        else:
            indices.append(entry)
    return ((args[0], tuple(indices), *args[2:]), "the content of the batch") if found else (args, sized_by)
