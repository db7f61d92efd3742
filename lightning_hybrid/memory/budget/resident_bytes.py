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
        results = [self._structure.results[index] for index in self._present & self._alive]
        return sum(result.nbytes for result in results if not result.is_elsewhere)

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
            else:
                peak = max(peak, self._repeat(waiting.pop()))
        return peak

    def _repeat(self, operation: int) -> int:
        """Repeat an operation whose arguments are in memory; return the bytes while it ends."""
        structure = self._structure
        reads, made = structure.reads[operation], self._makes.get(operation, [])
        drops = {read for read in reads if structure.results[read].is_intermediate and read not in self._permanent}
        wanted = {index for index in made if index in self._alive and index not in self._present}
        # All results are made, also those that nothing needs.
        before = self.nbytes() + sum(structure.results[index].nbytes for index in made)
        if structure.overwrites[operation] and reads[:1] and reads[0] in drops:
            before -= structure.results[reads[0]].nbytes
        self._present |= wanted
        self._present -= drops
        return before

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
