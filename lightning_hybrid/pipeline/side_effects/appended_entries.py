"""Entries that a step appends to lists of its modules: one per batch, joined from the microbatches'.

``self.outputs.append(loss)`` and its like are Lightning's own idiom for what an epoch's end looks at. A list that every
microbatch has made longer by as many entries gets them joined, entry by entry; all else that a step leaves on its
modules is as gradient accumulation leaves it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor, nn

from lightning_hybrid.step.batch.merge_outputs import join
from lightning_hybrid.step.objects.pytree import map_leaves
from lightning_hybrid.step.recording.kept_values import ListPlace, lists_of
from lightning_hybrid.step.standins.absent_tensors import AbsentFloat

Rows: TypeAlias = dict[ListPlace, list[list[Any]]]  # what each microbatch has appended


class AppendedEntries:
    """What one batch appends to the lists of one module."""

    def __init__(self, root: nn.Module) -> None:
        """Before the batch: args: root: the user's module."""
        self._root = root
        self._before = {place: len(held) for place, held in lists_of(root).items()}
        self._ends = [self._before]
        self.rows: Rows = {}

    def after_microbatch(self) -> None:
        """Note what it has appended."""
        held, last = lists_of(self._root), self._ends[-1]
        self._ends.append({place: len(entries) for place, entries in held.items()})
        for place, entries in held.items():
            begin = last.get(place, 0)
            if len(entries) > begin or place in self.rows:
                earlier: list[list[Any]] = [[] for _ in range(len(self._ends) - 2)]
                new = [map_leaves(_detached, entry) for entry in entries[begin:]]
                self.rows.setdefault(place, earlier).append(new)

    def evenly(self, count: int, contents: Sequence[Mapping[int, Tensor]] = ()) -> Rows:
        """What so many microbatches have appended, each as much as the others.

        Args:
            count: Of the microbatches, which are over.
            contents: By microbatch, the values of the model that numbers among the entries were read from, by index.
        """
        rows: Rows = {}
        for place, entries in lists_of(self._root).items():
            grown = entries[self._before.get(place, 0) :]
            each, rest = divmod(len(grown), count)
            if not each or rest:
                continue
            rows[place] = []
            for number in range(count):
                known = partial(_known, contents[number] if contents else {})
                mine = grown[number * each : (number + 1) * each]
                rows[place].append([map_leaves(known, entry) for entry in mine])
        return rows

    def put(
        self,
        rows: Rows,
        weights: Sequence[float],
        sizes: Sequence[int | None],
        losses: Sequence[float | None] = (),
        loss_weights: Sequence[float] = (),
    ) -> None:
        """Join what all microbatches of the batch have appended, those of other ranks too.

        Args:
            rows: By place.
            weights: Of the microbatches.
            sizes: Their numbers of samples.
            losses: Of the microbatches, which have their own weights.
            loss_weights: These.
        """

        def joined_of(column: list[Any]) -> Any:
            if not _are_equal(list(map(_number, column)), losses):
                return join(column, weights, sizes)
            known = [place for place, weight in enumerate(loss_weights) if weight]
            parts, shares = [column[place] for place in known], [loss_weights[place] for place in known]
            return join(parts, shares, [sizes[place] for place in known])

        held = lists_of(self._root)
        for place, of_each in rows.items():
            counts = {len(entries) for entries in of_each}
            if place not in held or len(of_each) != len(weights) or len(counts) != 1 or counts == {0}:
                continue
            if any(size is not None and size > 1 and counts == {size} for size in sizes):  # an entry per sample
                joined = [entry for entries in of_each for entry in entries]
            else:
                joined = [joined_of(list(column)) for column in zip(*of_each, strict=True)]
            held[place][self._before.get(place, 0) :] = joined


def merged(rows: Sequence[Rows], counts: Sequence[int]) -> Rows:
    """What the microbatches of several ranks have appended.

    Args:
        rows: Of the ranks.
        counts: Of their microbatches.
    """
    found: Rows = {}
    for place in dict.fromkeys(place for row in rows for place in row):
        of_ranks = zip(rows, counts, strict=True)
        found[place] = [entries for row, count in of_ranks for entries in row.get(place, [[] for _ in range(count)])]
    return found


def _known(content: Mapping[int, Tensor], leaf: Any) -> Any:
    """A leaf without its graph; a number that was read on another rank becomes what was read."""
    if isinstance(leaf, AbsentFloat) and len(leaf.values) == 1 and leaf.values <= content.keys():
        [value] = leaf.values
        return content[value].item()
    return _detached(leaf)


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _are_equal(some: Sequence[float | None], others: Sequence[float | None]) -> bool:
    """Also where numbers are NaN: means over nothing."""
    return list(map(str, some)) == list(map(str, others))


def _number(value: Any) -> float | None:
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else None
    return value if isinstance(value, float) else None
