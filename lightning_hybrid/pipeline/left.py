"""What the runs of a step leave for code of the user: what they return, and append to lists of its modules.

Where the parts of a batch leave a number, it is measured how these make that of the batch (``pipeline.measure``). What
is no number is joined, and must be what the batch leaves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor, nn

from lightning_hybrid.batch.merge import RETURNED, Leaf, join, numbers_in
from lightning_hybrid.errors import StepError
from lightning_hybrid.pipeline.kept import AppendedEntries, place_of
from lightning_hybrid.step.objects.pytree import flatten, map_leaves
from lightning_hybrid.step.objects.tensors import detached_leaf

Left: TypeAlias = Mapping[tuple[str, int], Any]  # by the place of an entry, and its number there, as in ``Leaf``


class LeftValues:
    """Collects what runs of a step leave; nothing unless its module is given."""

    def __init__(self, root: nn.Module | None = None, *, reads_output: bool = False) -> None:
        """Set up for the user's module; ``reads_output`` tells whether code reads what the step returns."""
        self._root, self._reads_output = root, reads_output
        self._appended: list[AppendedEntries] = []

    def begin(self) -> None:
        """Begin with a run."""
        self._appended = [] if self._root is None else [AppendedEntries(self._root)]

    def of(self, output: Any) -> Left:
        """What the run has left; its output is given."""
        found: dict[tuple[str, int], Any] = {}
        if self._reads_output and not isinstance(output, Tensor):
            found[RETURNED, 0] = map_leaves(detached_leaf, output)
        for appended in self._appended:
            appended.after_microbatch()
            for path, [entries] in appended.rows.items():
                found |= {(place_of(path), index): entry for index, entry in enumerate(entries)}
        return found


def numbers_of(runs: Sequence[Left]) -> list[dict[Leaf, float]]:
    """The numbers that each run has left, of the places where all have left equally many."""
    found: list[dict[Leaf, float]] = [{} for _ in runs]
    for place in places_of(runs):
        numbers = [numbers_in(run[place]) for run in runs]
        if all(each.keys() == numbers[0].keys() for each in numbers):
            for of_run, each in zip(found, numbers, strict=True):
                of_run.update((Leaf(*place, path), float(number)) for path, number in each.items())
    return found


def places_of(runs: Sequence[Left]) -> list[tuple[str, int]]:
    """The places where all runs have left an entry, in lists where all have appended equally many."""
    differing = {place for run in runs for place, index in run if any((place, index) not in other for other in runs)}
    return [each for each in runs[0] if each[0] not in differing]


def joined_tensors(
    full: Left, parts: Sequence[Left], weights: Sequence[float], sizes: Sequence[int | None]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The tensors of any shape that a batch leaves, each with its place, and as joined from the batch's parts."""
    for place in places_of([full, *parts]):
        try:
            joined = join([part[place] for part in parts], weights, sizes, step="training_step")
        except StepError:  # it is raised where the step runs
            continue
        for one, other in zip(flatten(full[place])[0], flatten(joined)[0], strict=False):
            if isinstance(one, Tensor) and isinstance(other, Tensor) and one.dim():
                yield place[0], one, other
