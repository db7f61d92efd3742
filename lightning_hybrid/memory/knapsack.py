"""Knapsack over a layer's operations: chooses the results to save that avoid the most recomputation per byte.

The budget is a share of the bytes that autograd would save. All other results are recomputed from the saved ones, so
the cost of an operation includes all that must run before it. The choice is greedy: each turn saves the operation that
avoids the most work per byte, given what is saved already. (Work and bytes of recomputation: Chen et al. 2016; saving
by operation: Korthikanti et al. 2022, section 5; the choice is a knapsack with precedence.)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """Cost and size of one operation of a layer.

    Attributes:
        work: Cost of repeating it, in any unit.
        reads: Indices of the earlier steps whose results it reads.
        nbytes: Bytes of its results that are read or saved.
        is_saved: Whether autograd saves a result of it.
        may_keep: Whether its results can be saved; one that another step overwrites cannot.
        is_free: Whether its results stay in memory anyway.
    """

    work: float
    reads: tuple[int, ...]
    nbytes: int
    is_saved: bool
    may_keep: bool = True
    is_free: bool = False


def choose_kept(steps: Sequence[Step], budget: int) -> frozenset[int]:
    """Returns the indices of the steps whose results are saved.

    Args:
        steps: Operations in the order in which they ran.
        budget: Bytes that may be saved.
    """
    kept = {number for number, step in enumerate(steps) if step.is_free and step.may_keep}
    while True:
        again = needed(steps, kept)
        best, best_ratio = -1, 0.0
        for number in sorted(again):
            step = steps[number]
            if not step.may_keep or step.nbytes > budget:
                continue
            spared = sum(steps[other].work for other in again - needed(steps, kept | {number}))
            ratio = spared / max(step.nbytes, 1)
            if ratio > best_ratio:
                best, best_ratio = number, ratio
        if best < 0:
            return frozenset(kept)
        kept.add(best)
        budget -= steps[best].nbytes


def needed(steps: Sequence[Step], kept: Collection[int]) -> set[int]:
    """Returns the steps that the backward must repeat if the results of ``kept`` are saved."""
    found: set[int] = set()
    waiting = [number for number, step in enumerate(steps) if step.is_saved and number not in kept]
    while waiting:
        number = waiting.pop()
        if number not in found:
            found.add(number)
            waiting += [read for read in steps[number].reads if read not in kept]
    return found
