"""Data-dependent sizes that a step reads: ``loss / h[mask].shape[0]``.

They are plain Python numbers, which cannot be traced. So every later operation that takes a number, or a tensor that
may have been made of one, counts as reading them, and the values are sent to the stage that runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_hybrid.graph.step_graph import Node


class DynamicSizeReads:
    """Data-dependent sizes read during one recording."""

    def __init__(self) -> None:
        """Start without any recorded operation."""
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
