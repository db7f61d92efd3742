"""The recomputation that a budget is expected to choose, from the estimated memory of stages, for the start table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from lightning_hybrid.errors import RecomputeError
from lightning_hybrid.memory.estimate_rank_memory import RankMemory
from lightning_hybrid.memory.recompute.budget import BudgetedLayers


class ExpectedRecomputation(NamedTuple):
    """What a budget is expected to choose.

    Attributes:
        memory: Of each stage.
        shares: Of the bytes that layers would save, by pipeline rank: the part that is recomputed.
    """

    memory: list[RankMemory]
    shares: list[float]

    def __str__(self) -> str:
        """The shares in words."""
        least, most = (f"{100 * share:.0f}" for share in (min(self.shares), max(self.shares)))
        return f"{least if least == most else f'{least} to {most}'} % of what they save, as estimated"


def expected_recomputation(
    budget: BudgetedLayers,
    floor: Sequence[RankMemory],
    full: Sequence[RankMemory],
    rank_of: Callable[[int], int],
) -> ExpectedRecomputation | None:
    """Return what a budget is expected to choose; None where the activations or the free memory are not known.

    Args:
        budget: Of each rank; a share of the free memory is that of this rank.
        floor: The memory of each stage whose layers keep nothing.
        full: The same without recomputation.
        rank_of: The pipeline rank of a stage.
    """
    saved = [(low.activations, high.activations) for low, high in zip(floor, full, strict=True)]
    known = [(low, high) for low, high in saved if low is not None and high is not None]
    if len(known) < len(saved):
        return None
    stages: dict[int, list[int]] = {}
    for number in range(len(floor)):
        stages.setdefault(rank_of(number), []).append(number)
    try:
        allowed = budget.allowed_bytes(floor[0].parameters)
    except RecomputeError:  # it is raised where the budget is used
        return None
    memory, shares = list(floor), []
    for _, numbers in sorted(stages.items()):
        most = sum(known[number][1] - known[number][0] for number in numbers)
        left = allowed - sum(floor[number].total for number in numbers)
        kept = min(1.0, max(0.0, left / most)) if most > 0 else 1.0
        shares.append(1.0 - kept)
        for number in numbers:
            low, high = known[number]
            working = floor[number].working + kept * (full[number].working - floor[number].working)
            kept_bytes = int(low + kept * (high - low))
            memory[number] = dataclasses.replace(floor[number], activations=kept_bytes, working=int(working))
    return ExpectedRecomputation(memory, shares)
