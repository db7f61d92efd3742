"""A knapsack over a layer's operations: keep the results that cost most to make again, for each byte.

What a layer would save is one set of bytes; a share of it is to be spent. Everything else is made again from what is
kept, so an operation is dear together with all that must run before it. The choice is greedy: at each turn the
operation that spares the most work per byte, given what is kept already. (Work and bytes of recomputation: Chen et al.
2016; keeping by operation: Korthikanti et al. 2022, section 5; the choice is a knapsack with precedence.)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """An operation of a layer, as far as the choice goes.

    Attributes:
        work: What repeating it costs, in any unit.
        reads: Numbers of the earlier steps whose results it reads.
        nbytes: Of its results that somebody reads.
        is_saved: Whether autograd saves a result of it.
        may_keep: Whether its results can be kept; one that another step overwrites cannot.
        is_free: Whether its results stay in memory anyway.
    """

    work: float
    reads: tuple[int, ...]
    nbytes: int
    is_saved: bool
    may_keep: bool = True
    is_free: bool = False


def choose_kept(steps: Sequence[Step], budget: int) -> frozenset[int]:
    """The numbers of steps whose results are kept.

    Args:
        steps: In the order in which they ran.
        budget: Bytes that may be kept.
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
    """The steps that must run again if the results of others are kept."""
    found: set[int] = set()
    waiting = [number for number, step in enumerate(steps) if step.is_saved and number not in kept]
    while waiting:
        number = waiting.pop()
        if number not in found:
            found.add(number)
            waiting += [read for read in steps[number].reads if read not in kept]
    return found
