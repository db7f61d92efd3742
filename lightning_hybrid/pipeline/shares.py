"""Ranks of a pipeline that run the user's step on a share of the batch each, where it cannot be cut into stages.

Their losses are weighted by their numbers of samples, so that gradients are those of the whole batch where the loss is
a mean over samples. What a step logs and returns is put together on every one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.pipeline.appended import Rows, merged
from lightning_hybrid.pipeline.logs import Entry
from lightning_hybrid.pipeline.returned import Results
from lightning_hybrid.step.microbatch import BatchSplitter, batch_size_of, sizes_of, split
from lightning_hybrid.step.tree import map_leaves


@dataclass(frozen=True)
class Part:
    """What one rank runs of a batch.

    Attributes:
        microbatches: One after the other.
        weights: Of their means in that of the whole batch; over all ranks they sum to 1.
        first: Number of the first microbatch among those of the whole batch.
        total: How many these are.
    """

    microbatches: Sequence[Any]
    weights: Sequence[float]
    first: int
    total: int


class Shares:
    """The ranks that share the batches of one replica."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Args: group: the ranks."""
        self._group = group
        self.rank, self.size = group.rank(), group.size()

    def of(self, batch: Any, count: int, splitter: BatchSplitter | None) -> Part:
        """This rank's part of a batch; all of it where there is not a sample for each rank.

        Args:
            batch: The same on all ranks.
            count: Microbatches that each rank splits its share into.
            splitter: The user's.
        """
        size = batch_size_of(batch)
        if self.size > 1 and splitter is None and (size is None or size < self.size):
            return Part([batch], [1 / self.size], 0, 1)
        if splitter is None and size is not None:
            count = min(count, size // self.size)
        parts, weights = split(batch, self.size * count, splitter)
        own = slice(self.rank * count, (self.rank + 1) * count)
        return Part(parts[own], weights[own], self.rank * count, self.size * count)

    def together(self, mine: Given) -> Given:
        """What all ranks have of a step; collective.

        Args:
            mine: What this rank has.
        """
        if self.size == 1:
            return mine
        rows: list[Any] = [None] * self.size
        entries: Any = [_plain(entry) for entry in mine.entries]
        outputs, appended = map_leaves(_sent, mine.outputs), map_leaves(_sent, mine.appended)
        sent = replace(mine, entries=entries, outputs=outputs, appended=appended)
        dist.all_gather_object(rows, sent, group=self._group)
        rows[self.rank] = mine
        return Given(
            weights=[weight for row in rows for weight in row.weights],
            entries=_joined(rows, self.rank),
            losses=[loss for row in rows for loss in row.losses],
            sizes=[size for row in rows for size in row.sizes],
            outputs=[output for row in rows for output in row.outputs],
            appended=merged([row.appended for row in rows], [len(row.weights) for row in rows]),
        )


@dataclass
class Given:
    """What a step gave, by microbatch.

    Attributes:
        weights: Of the microbatches.
        entries: What was logged, with a value for each of them; NaN where one has not logged it.
        losses: None where a microbatch has returned none.
        sizes: Numbers of samples.
        outputs: What the step returned, without its graph; empty if nobody reads it.
        appended: What it has appended to lists of the user's modules.
    """

    weights: list[float]
    entries: list[Entry]
    losses: list[float | None]
    sizes: list[int | None]
    outputs: list[Any]
    appended: Rows = field(default_factory=dict)

    def joined_output(self, step: str) -> Any:
        """What the step returned for the whole batch.

        Args:
            step: Its name.
        """
        return Results(step, self.outputs, [], self.weights, self.sizes).joined()

    @property
    def loss(self) -> float | None:
        """That of the whole batch; None if no microbatch has one."""
        known = [(loss, weight) for loss, weight in zip(self.losses, self.weights, strict=True) if loss is not None]
        return sum(loss * weight for loss, weight in known) if known else None

    def logs(self) -> list[tuple[Entry, float]]:
        """Each entry with its value for the whole batch, of the microbatches that have logged it."""
        return [(entry, entry.combine_known(self.weights)) for entry in self.entries]


def given_by(
    entries: Sequence[Entry], weights: Sequence[float], losses: Sequence[Tensor | None], part: Part, outputs: list[Any]
) -> Given:
    """What this rank has of a step.

    Args:
        entries: What was logged.
        weights: Of the microbatches.
        losses: By microbatch.
        part: Of the batch.
        outputs: By microbatch.
    """
    numbers = [None if loss is None else float(loss) for loss in losses]
    return Given(list(weights), list(entries), numbers, sizes_of(part.microbatches), outputs)


def _plain(entry: Entry) -> Any:
    """What another rank needs to know of an entry."""
    return entry.name, entry.values, entry.sizes


def _joined(rows: Sequence[Given], rank: int) -> list[Entry]:
    """The entries of all ranks: those of this rank, with the values of the others."""
    counts = [len(row.weights) for row in rows]
    found: list[Entry] = []
    seen: dict[str, int] = {}
    for entry in rows[rank].entries:
        number = seen[entry.name] = seen.get(entry.name, -1) + 1
        values: list[float] = []
        sizes: list[int | None] = []
        for place, row in enumerate(rows):
            named = [known if isinstance(known, tuple) else _plain(known) for known in row.entries]
            same = [known for known in named if known[0] == entry.name]
            _, theirs, their_sizes = same[number] if number < len(same) else ("", [float("nan")] * counts[place], [])
            values += theirs
            sizes += their_sizes
        found.append(entry.with_values(values, sizes))
    return found


def _sent(leaf: Any) -> Any:
    return leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf
