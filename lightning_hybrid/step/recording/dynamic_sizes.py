"""Sizes that depend on values and that a step reads: ``loss / h[mask].shape[0]``.

To Python they are plain numbers, which nobody can follow. So whatever is given a number afterwards, or a tensor that
may have been made of one, counts as reading them: they are sent to where it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_hybrid.graph.step_graph import Node


class SizesRead:
    """Those of one recording."""

    def __init__(self) -> None:
        """No operation is known."""
        self._sized: set[int] = set()
        self._read: dict[int, None] = {}

    def made(self, node: Node) -> None:
        """Take note of an operation whose result has such a size, itself or by what it is given."""
        if node.sized_by or not self._sized.isdisjoint(node.inputs):
            self._sized.update(node.outputs)

    def read(self, value: int | None) -> None:
        """The step asks for the shape of a value; None is none."""
        if value in self._sized:
            self._read[value] = None

    def among(self, leaves: Sequence[Any], marks: Sequence[int | None], others: tuple[int, ...]) -> tuple[int, ...]:
        """The values that an operation reads beside its arguments.

        Args:
            leaves: Of its arguments.
            marks: The value that each tensor among them is; None if it is of the batch or a parameter.
            others: That it is known to read.
        """
        if not self._read:
            return others
        is_given = None in marks or any(type(leaf) in (int, float) for leaf in leaves)
        return tuple(dict.fromkeys((*others, *self._read))) if is_given else others
