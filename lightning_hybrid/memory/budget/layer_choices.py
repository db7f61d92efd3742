"""One choice for each layer of a rank, by integer programming: the least work under the budget at every time of a step.

    minimize  sum work[l, c] * y[l, c]    subject to    sum_c y[l, c] = 1                        for each layer l
              other[t] + sum resident[t, l, c] * y[l, c] <= budget                               for each interval t

``y[l, c]`` is 1 if layer l takes choice c; ``resident[t, l, c]`` are the bytes of all its runs in flight, those in the
middle of their backward included, and ``other[t]`` what is alive besides. Intervals in which the same run of a layer is
in its backward become one constraint, with the peak over these intervals for each choice.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lightning_hybrid.memory.budget.integer_program import minimize_binary
from lightning_hybrid.memory.budget.kept_results import Choice
from lightning_hybrid.memory.budget.layer_structure import LayerStructure
from lightning_hybrid.memory.budget.resident_bytes import Event, resident_bytes
from lightning_hybrid.memory.budget.step_profile import Interval, LayerRun, StepProfile

_SECONDS = 20.0
_GAP = 2e-3  # of the work, at which the search ends


@dataclass
class LayerChoices:
    """The choices for the runs of one layer that take the same operations.

    Attributes:
        fqn: Of the layer.
        largest: The structure of its run with the most saved bytes.
        choices: The one that keeps the fewest bytes first.
        num_runs: Their number.
        column: Position of the first choice among the variables.
    """

    fqn: str
    largest: LayerStructure
    choices: Sequence[Choice] = ()
    num_runs: int = 0
    column: int = 0

    @property
    def columns(self) -> slice:
        """Positions of its choices among the variables."""
        return slice(self.column, self.column + len(self.choices))


class Solution(NamedTuple):
    """A choice for each layer.

    Attributes:
        choices: By FQN and `LayerStructure.key`.
        peak: In bytes.
        time: An interval of the profile in which the peak is.
    """

    choices: dict[tuple[str, Hashable], Choice]
    peak: int
    time: Interval


@dataclass
class BudgetProgram:
    """The integer program of one profile.

    Attributes:
        layers: By FQN and `LayerStructure.key`.
        rows: Bytes in each constraint by variable, of shape ``(constraints, variables)``; what is alive besides is
            part of those of one layer, of which exactly one choice is taken.
        times: By constraint, the first of its intervals.
    """

    layers: dict[tuple[str, Hashable], LayerChoices]
    rows: np.ndarray
    times: Sequence[Interval]

    def solve(self, budget: int) -> Solution | None:
        """Return the choices of the least work under a budget in bytes; None if there are none."""
        cost = np.concatenate([[c.work * group.num_runs for c in group.choices] for group in self.layers.values()])
        one_each = self._one_each()
        matrix = np.concatenate([one_each, -one_each, -self.rows / budget])
        least = np.concatenate([np.ones(len(one_each)), -np.ones(len(one_each)), -np.ones(len(self.rows))])
        return self._solution(minimize_binary(cost, matrix, least, seconds=_SECONDS, gap=_GAP))

    def lowest(self) -> Solution:
        """Return the choices of the lowest peak."""
        one_each, scale = self._one_each(), float(self.rows.max()) or 1.0
        count = self.rows.shape[1]
        # The last variable is the peak, in units of the scale.
        matrix = np.concatenate([one_each, -one_each, -self.rows / scale])
        is_row = np.concatenate([np.zeros(2 * len(one_each)), np.ones(len(self.rows))])
        matrix = np.concatenate([matrix, is_row[:, None]], axis=1)
        least = np.concatenate([np.ones(len(one_each)), -np.ones(len(one_each)), np.zeros(len(self.rows))])
        upper = np.append(np.ones(count), np.inf)
        cost = np.append(np.zeros(count), 1.0)
        found = minimize_binary(cost, matrix, least, upper=upper, num_continuous=1, seconds=_SECONDS)
        lowest = self._solution(None if found is None else found[:-1])
        first = np.zeros(count)
        first[[group.column for group in self.layers.values()]] = 1
        profiled = self._solution(first)
        assert profiled is not None
        return profiled if lowest is None or profiled.peak <= lowest.peak else lowest

    def _one_each(self) -> np.ndarray:
        """The matrix that sums the variables of each layer."""
        matrix = np.zeros((len(self.layers), self.rows.shape[1]))
        for number, group in enumerate(self.layers.values()):
            matrix[number, group.columns] = 1
        return matrix

    def _solution(self, found: np.ndarray | None) -> Solution | None:
        if found is None:
            return None
        found = np.round(found)
        peaks = self.rows @ found
        highest = int(np.argmax(peaks))
        choices = {key: group.choices[int(np.argmax(found[group.columns]))] for key, group in self.layers.items()}
        return Solution(choices, int(peaks[highest]), self.times[highest])


def program_of(profile: StepProfile, choices_of: Callable[[str, LayerStructure], Sequence[Choice]]) -> BudgetProgram:
    """Return the program of a profile.

    Args:
        profile: Of batches in which each layer took its first choice.
        choices_of: Returns the choices for a layer by its FQN and its largest run.
    """
    layers: dict[tuple[str, Hashable], LayerChoices] = {}
    for run in profile.runs:
        if run.structure is None:
            continue
        group = layers.setdefault((run.fqn, run.structure.key), LayerChoices(run.fqn, run.structure))
        group.num_runs += 1
        if run.structure.saved_bytes > group.largest.saved_bytes:
            group.largest = run.structure
    known: dict[LayerStructure, Sequence[Choice]] = {}
    column = 0
    for group in layers.values():
        if group.largest not in known:
            known[group.largest] = choices_of(group.fqn, group.largest)
        group.choices, group.column = known[group.largest], column
        column += len(group.choices)
    rows, times = _Rows(layers, column).of(profile.intervals)
    kept = _largest(rows)
    return BudgetProgram(layers, rows[kept], [times[number] for number in kept])


class _Rows:
    """Builds the constraints."""

    def __init__(self, layers: dict[tuple[str, Hashable], LayerChoices], count: int) -> None:
        self._layers, self._rows, self._times = layers, list[np.ndarray](), list[Interval]()
        self._first = [group.column for group in layers.values()]
        self._now = np.zeros(count)  # by variable, the bytes of all runs in flight
        self._of_run: dict[LayerRun, np.ndarray] = {}  # by position and choice
        self._known: dict[tuple[LayerStructure, tuple[Event, ...]], np.ndarray] = {}
        self._at: dict[LayerRun, int] = {}

    def of(self, intervals: Sequence[Interval]) -> tuple[np.ndarray, list[Interval]]:
        """Return the rows, of shape ``(constraints, variables)``, and an interval of each."""
        own: LayerRun | None = None
        own_time = intervals[0]
        bytes_of_own: list[np.ndarray] = []
        others = self._now.copy()

        def finish() -> None:
            if own is not None and bytes_of_own:
                row = others.copy()
                row[self._group(own).columns] += np.max(bytes_of_own, axis=0)
                self._rows.append(row)
                self._times.append(own_time)

        for interval in intervals:
            run = interval.run
            is_event = run is not None and run.structure is not None and interval.kind not in ("enter", None)
            if not is_event or run is not own:
                finish()
                own, bytes_of_own = None, []
            if not is_event:
                self._add_constant(interval)
                continue
            assert run is not None
            if run is not own:
                own, own_time = run, interval
                others = self._now.copy()
                others[self._group(run).columns] -= self._resident(run)
            self._move(run, interval.position)
            besides = interval.peak - self._now[self._first].sum()
            bytes_of_own.append(besides + self._resident(run))
        finish()
        return np.array(self._rows), self._times

    def _add_constant(self, interval: Interval) -> None:
        """Add the row of an interval in which no run of a layer has an event."""
        row = self._now.copy()
        first = next(iter(self._layers.values()))
        row[first.columns] += interval.peak - self._now[self._first].sum()
        self._rows.append(row)
        self._times.append(interval)

    def _group(self, run: LayerRun) -> LayerChoices:
        assert run.structure is not None
        return self._layers[run.fqn, run.structure.key]

    def _resident(self, run: LayerRun) -> np.ndarray:
        """The bytes of a run at its present position, by choice."""
        if run not in self._at:
            return np.zeros(len(self._group(run).choices))
        return self._table(run)[self._at[run]]

    def _move(self, run: LayerRun, position: int) -> None:
        columns = self._group(run).columns
        self._now[columns] -= self._resident(run)
        self._at[run] = position
        self._now[columns] += self._resident(run)

    def _table(self, run: LayerRun) -> np.ndarray:
        if run not in self._of_run:
            structure = run.structure
            assert structure is not None
            key = structure, tuple(run.events)
            if key not in self._known:
                kept_sets = [choice.kept for choice in self._group(run).choices]
                columns = [
                    resident_bytes(structure, structure.saved_operations if kept is None else kept, run.events)
                    for kept in kept_sets
                ]
                self._known[key] = np.array(columns, dtype=float).T
            self._of_run[run] = self._known[key]
        return self._of_run[run]


def _largest(rows: np.ndarray) -> list[int]:
    """Return the numbers of the rows that are not at most another one in each variable."""
    chosen: list[int] = []
    for number in np.argsort(-rows.sum(axis=1), kind="stable"):
        if not (rows[chosen] >= rows[number]).all(axis=1).any():
            chosen.append(int(number))
    return chosen
