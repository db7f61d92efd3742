"""Choices of the results that a layer keeps: the least work for several numbers of bytes, by integer programming.

For each operation two binary variables: k, its results are kept, and r, it is repeated in the backward.

    minimize  sum work * r    subject to    sum bytes * k <= budget
              k + r >= 1      for operations of which autograd saves a result
              k_i + r_i >= r  for each operation i whose results an operation with r reads

(Jain et al. 2020, Checkmate, whose program has a variable for each operation and time; here a layer's backward repeats
an operation at most once.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lightning_hybrid.memory.budget.integer_program import minimize_binary
from lightning_hybrid.memory.budget.layer_structure import LayerStructure
from lightning_hybrid.memory.knapsack import Step, choose_kept, needed

NUM_LEVELS = 16  # numbers of bytes between none and all for which results are chosen
_MAX_OPERATIONS = 300  # of a layer that is solved exactly
_SECONDS = 10.0  # for each of the levels, a hundredth of which is usual; a greedy choice where that is not enough
# Time of Python for each operation that is recorded, as floating-point operations of a matrix product.
_WORK_OF_RECORDING = {"cpu": 1.5e6, "cuda": 3e8}


class Choice(NamedTuple):
    """What a layer keeps.

    Attributes:
        kept: Operations whose results are kept; None: the layer runs as if there was no recomputation.
        work: What it costs, in floating-point operations.
    """

    kept: frozenset[int] | None
    work: float


def choices_of(structure: LayerStructure, device_type: str, *, always_recorded: bool = False) -> list[Choice]:
    """Return choices for a layer, the one that keeps the fewest bytes first, and the one without recomputation last.

    Args:
        structure: A run of the layer.
        device_type: Of the compute device, such as "cuda".
        always_recorded: Whether the layer must be recorded, also if it keeps everything.
    """
    recording = len(structure.steps) * _WORK_OF_RECORDING.get(device_type, 3e8)
    total = sum(step.nbytes for step in structure.steps if step.is_saved and not step.is_free)
    kept_sets = [structure.unavoidable]
    levels = range(1, NUM_LEVELS) if total else ()
    kept_sets += [choose_results(structure.steps, total * level // NUM_LEVELS) for level in levels]
    choices = [Choice(kept, _work(structure.steps, kept) + recording) for kept in dict.fromkeys(kept_sets)]
    return [*choices, Choice(structure.saved_operations, recording) if always_recorded else Choice(None, 0.0)]


def choose_results(steps: Sequence[Step], budget: int) -> frozenset[int]:
    """Return the operations whose results are kept: at most ``budget`` bytes, at the least work."""
    if len(steps) > _MAX_OPERATIONS:
        return choose_kept(steps, budget)
    count = len(steps)
    free = np.array([step.is_free and step.may_keep for step in steps])
    # In shares of the budget: the solver's tolerance is absolute.
    sizes = np.array([0 if step.is_free else step.nbytes / max(budget, 1) for step in steps], dtype=float)
    rows: list[tuple[dict[int, float], float]] = []  # coefficients by variable, and the least value of their sum
    for number, step in enumerate(steps):
        if step.is_saved:
            rows.append(({number: 1.0, count + number: 1.0}, 1.0))
        rows += [({read: 1.0, count + read: 1.0, count + number: -1.0}, 0.0) for read in set(step.reads)]
    matrix = np.zeros((len(rows) + 1, 2 * count))
    least = np.array([*(bound for _, bound in rows), -1.0])
    for index, (row, _) in enumerate(rows):
        for variable, coefficient in row.items():
            matrix[index, variable] += coefficient
    matrix[-1, :count] = -sizes
    may_keep = np.array([step.may_keep for step in steps])
    work = np.array([step.work for step in steps])
    cost = np.concatenate([1e-6 * work.max() * sizes, work])  # of equal choices the one with fewer bytes
    lower = np.concatenate([free, np.zeros(count)])
    upper = np.concatenate([may_keep, np.ones(count)])
    found = minimize_binary(cost, matrix, least, lower=lower, upper=upper, seconds=_SECONDS)
    if found is None:
        return choose_kept(steps, budget)
    return frozenset(int(number) for number in np.flatnonzero(found[:count] > 0.5))


def _work(steps: Sequence[Step], kept: frozenset[int]) -> float:
    return sum(steps[number].work for number in needed(steps, kept))
