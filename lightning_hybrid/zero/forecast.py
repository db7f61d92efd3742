"""Which parameters a rank will gather next: the same as in the steps before, if two of them were the same."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import ClassVar, TypeAlias

import torch

_Gather: TypeAlias = tuple[int, bool]  # which group, and whether in a backward


class Forecast:
    """The gathers of one rank, by parts of a step; a part ends where all ranks wait for each other.

    Attributes:
        MOST: The most gathers of a forward that are foreseen.
        MOST_IN_BACKWARD: The same of a backward.
        MORE: Follows those that are foreseen, if the forward or backward has more.
    """

    MOST: ClassVar[int] = 64
    MOST_IN_BACKWARD: ClassVar[int] = 4
    MORE: ClassVar[int] = -3

    def __init__(self) -> None:
        """Foresee nothing, before any step has run."""
        # By number of the part, and whether it records a graph: its gathers, and whether the step before had the same.
        self._parts: dict[tuple[int, bool], tuple[list[_Gather], bool]] = {}
        self._part, self._key = 0, (0, False)
        self._gathers: list[_Gather] = []  # so far in this part

    def begin_step(self) -> None:
        """Begin a step."""
        self._part, self._gathers = 0, []

    def add(self, positions: Sequence[int]) -> None:
        """Record gathers of this rank."""
        if not self._gathers:
            self._key = self._part, torch.is_grad_enabled()
        in_backward = torch._C._current_graph_task_id() != -1
        self._gathers += [(position, in_backward) for position in positions]

    @property
    def called(self) -> list[int]:
        """The groups that this rank has gathered in the forward, in the order of their first calls."""
        return list(dict.fromkeys(position for position, in_backward in self._gathers if not in_backward))

    def following(self, skipped: int = 0) -> list[int]:
        """The gathers that come next, of the same forward or backward, without the first ``skipped`` ones.

        None are foreseen in a part that is new.
        """
        before, is_repeated = self._parts.get(self._key, ([], False))
        count = len(self._gathers)
        if not is_repeated or not count or before[:count] != self._gathers:
            return []
        in_backward = self._gathers[-1][1]
        same = [position for position, _ in itertools.takewhile(lambda g: g[1] == in_backward, before[count:])]
        same, most = same[skipped:], self.MOST_IN_BACKWARD if in_backward else self.MOST
        return [*same[:most], self.MORE] if len(same) > most else same

    def end_part(self) -> None:
        """End a part of a step; one without gathers is none."""
        if not self._gathers:
            return
        before, _ = self._parts.get(self._key, ([], False))
        self._parts[self._key] = self._gathers, before == self._gathers
        self._part, self._gathers = self._part + 1, []
