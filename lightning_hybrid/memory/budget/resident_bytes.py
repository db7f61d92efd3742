"""The bytes that one run of a layer keeps, from its forward to the end of its backward, for a choice of kept results.

The backward is simulated: which saved tensors it restores, and when autograd releases them, is known from a batch that
kept nothing, and the recomputation is that of `recomputable_values_and_operations`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

from lightning_hybrid.memory.budget.layer_structure import OUTSIDE, LayerStructure


class Event(NamedTuple):
    """What happened to a saved tensor of a layer in its backward.

    Attributes:
        kind: "restore" as its restoration begins, "restored" as that ends, "release" as autograd lets go of it.
        save: Its number, in the order in which autograd saved them.
    """

    kind: Literal["restore", "restored", "release"]
    save: int


def resident_bytes(structure: LayerStructure, kept: Collection[int], events: Sequence[Event]) -> list[int]:
    """Return the bytes that the run keeps after its forward, and then after each event; the peak within a restoration.

    Args:
        structure: The run.
        kept: The operations whose results are kept.
        events: Of its backward.
    """
    backward = _Backward(structure, kept)
    resident = [backward.nbytes()]
    for kind, save in events:
        number = structure.saves[save]
        if number == OUTSIDE:
            resident.append(backward.nbytes())
        elif kind == "restore":
            resident.append(backward.restore(number))
        else:
            if kind == "release":
                backward.release(number)
            resident.append(backward.nbytes())
    return resident


class _Backward:
    """The results that are alive and in memory while the backward of a layer runs."""

    def __init__(self, structure: LayerStructure, kept: Collection[int]) -> None:
        self._structure = structure
        may_keep = {number for number in kept if structure.steps[number].may_keep}
        self._permanent = {
            index
            for index, result in enumerate(structure.results)
            if result.is_permanent or result.operation in may_keep
        }
        self._makes: dict[int, list[int]] = {}
        for index, result in enumerate(structure.results):
            self._makes.setdefault(result.operation, []).append(index)
        self._saves = Counter(number for number in structure.saves if number != OUTSIDE)
        self._present = set(self._permanent)
        self._alive = self._reachable()

    def nbytes(self) -> int:
        """Bytes of the results that are in memory."""
        results = self._structure.results
        return sum(results[index].nbytes for index in self._present & self._alive)

    def release(self, number: int) -> None:
        """Let autograd release a save of a result."""
        self._saves[number] -= 1
        if not self._saves[number]:
            self._alive = self._reachable()
            self._present &= self._alive

    def restore(self, number: int) -> int:
        """Recompute a result where it is not in memory; return the peak."""
        structure, peak = self._structure, self.nbytes()
        waiting = [] if number in self._present else [structure.results[number].operation]
        while waiting:
            operation = waiting[-1]
            missing = [read for read in structure.reads[operation] if read not in self._present]
            if missing:
                waiting += [structure.results[read].operation for read in missing]
                continue
            waiting.pop()
            self._present |= self._alive.intersection(self._makes.get(operation, ()))
            peak = max(peak, self.nbytes())
            for read in structure.reads[operation]:
                if structure.results[read].is_intermediate and read not in self._permanent:
                    self._present.discard(read)
        return peak

    def _reachable(self) -> set[int]:
        """Results that autograd saves, or that a recipe of a reachable one reads."""
        found: set[int] = set()
        waiting = [number for number, count in self._saves.items() if count]
        while waiting:
            number = waiting.pop()
            if number not in found:
                found.add(number)
                if number not in self._permanent:
                    waiting += self._structure.reads[self._structure.results[number].operation]
        return found
