"""Data shares of a batch: pipeline ranks that each run the user's step on some samples, where no cut can be made.

Their losses are weighted by their numbers of samples, so that gradients are those of the whole batch where the loss is
a mean over samples. What a step logs and returns is put together on every one of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.collectives.rank_agreement import digest, other_batches
from lightning_hybrid.pipeline.loss_weights.mixed_objectives import Weighing, agreed_by
from lightning_hybrid.pipeline.results.log_capture import Entry, Key, keyed, keys_of
from lightning_hybrid.pipeline.side_effects.appended_entries import Rows, merged
from lightning_hybrid.step.batch.merge_outputs import join
from lightning_hybrid.step.batch.microbatch import BatchSplitter, batch_size_of, split
from lightning_hybrid.step.objects.pytree import flatten, map_leaves

_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Part:
    """What one rank runs of a batch.

    Attributes:
        microbatches: One after the other.
        weights: Their shares of the samples; over all ranks they sum to 1.
        loss_weights: Likewise of their losses in that of the whole batch.
        first: Number of the first microbatch among those of the whole batch.
        total: How many these are.
        ranks: How many share the batch; 1 if each of them runs all of it.
        checksum: Of the whole batch.
    """

    microbatches: Sequence[Any]
    weights: Sequence[float]
    loss_weights: Sequence[float]
    first: int
    total: int
    ranks: int
    checksum: int = 0


class Shares:
    """The ranks that share the batches of one replica.

    Attributes:
        rank: This one's number.
        size: How many they are.
        are_all: Whether there are no other replicas.
    """

    def __init__(self, group: dist.ProcessGroup, everyone: dist.ProcessGroup) -> None:
        """Args: group: the ranks. everyone: with those of other replicas, which hold shards of the same parameters."""
        self._group, self._everyone = group, everyone
        self.rank, self.size = group.rank(), group.size()
        self.are_all = group.size() == everyone.size()

    def of(self, batch: Any, count: int, splitter: BatchSplitter | None, weighing: Weighing) -> Part:
        """This rank's part of a batch; all of it where there is not a sample for each rank.

        Args:
            batch: The same on all ranks.
            count: Microbatches that each rank splits its share into.
            splitter: The user's.
            weighing: Of the loss.
        """
        count = self.count(batch, count, splitter)
        if not count:
            return self.whole(batch)
        parts, weights = split(batch, self.size * count, splitter)
        own, of_loss = slice(self.rank * count, (self.rank + 1) * count), weighing.of(parts, weights)
        checksum = digest(flatten(batch)[0]) if self.size > 1 else 0
        return Part(parts[own], weights[own], of_loss[own], self.rank * count, self.size * count, self.size, checksum)

    def count(self, batch: Any, count: int, splitter: BatchSplitter | None) -> int:
        """Microbatches of each share; 0 where there is not a sample for each rank. Arguments as for ``of``."""
        size = batch_size_of(batch)
        if splitter is not None or (self.size == 1 and size is None):
            return count
        return 0 if size is None else min(count, size // self.size)

    @staticmethod
    def whole(batch: Any) -> Part:
        """All of a batch, on every rank."""
        return Part([batch], [1.0], [1.0], first=0, total=1, ranks=1)

    def on_any(self, seen: bool) -> bool:
        """Whether some rank of any replica has seen it; collective over all of them."""
        return bool(self.most(int(seen)))

    def most(self, seen: int) -> int:
        """The largest number of all ranks of all replicas; collective over them."""
        rows: list[Any] = [None] * self._everyone.size()
        dist.all_gather_object(rows, seen, group=self._everyone)
        return max(rows)

    def agree(self, mine: Weighing) -> Weighing:
        """What the ranks of all replicas have found of one step; collective over them.

        Args:
            mine: What this rank has found.
        """
        return agreed_by(self._everyone, mine)

    def together(self, mine: Given) -> Given:
        """What all ranks have of a step that each has run on a share; collective.

        Args:
            mine: What this rank has.

        Raises:
            RanksDisagree: They have other batches.
        """
        rows: list[Any] = [None] * self.size
        entries: Any = [_plain(entry) for entry in mine.entries]
        outputs, appended = map_leaves(_sent, mine.outputs), map_leaves(_sent, mine.appended)
        sent = replace(mine, entries=entries, outputs=outputs, appended=appended)
        dist.all_gather_object(rows, sent, group=self._group)
        rows[self.rank] = mine
        if len({row.checksum for row in rows}) > 1:
            raise other_batches([row.checksum for row in rows])
        return Given(
            weights=[weight for row in rows for weight in row.weights],
            loss_weights=[weight for row in rows for weight in row.loss_weights],
            by_samples=mine.by_samples,
            entries=_joined(rows, self.rank),
            losses=[loss for row in rows for loss in row.losses],
            sizes=[size for row in rows for size in row.sizes],
            outputs=[output for row in rows for output in row.outputs],
            appended=merged([row.appended for row in rows], [len(row.weights) for row in rows]),
            news=LEAVES if _branches_apart(rows) else max(row.news for row in rows),
        )


BRANCHES, LEAVES = 1, 2


@dataclass
class Given:
    """What a step gave, by microbatch.

    Attributes:
        weights: Of the microbatches.
        loss_weights: Of their losses.
        by_samples: What the step logs that does not weigh as its loss does.
        entries: What was logged, with a value for each of them; NaN where one has not logged it.
        losses: None where a microbatch has returned none.
        sizes: Numbers of samples.
        outputs: What the step returned, without its graph; empty if no code reads it.
        appended: What it has appended to lists of the user's modules.
        news: ``LEAVES`` if it has left something else of its batch on them; ``BRANCHES`` if it has run other lines of
            code than before; else 0.
        calls: The lines of code that it has run.
        checksum: Of the whole batch.
    """

    weights: list[float]
    loss_weights: list[float]
    by_samples: frozenset[Key]
    entries: list[Entry]
    losses: list[float | None]
    sizes: list[int | None]
    outputs: list[Any]
    appended: Rows = field(default_factory=dict)
    news: int = 0
    calls: frozenset[int] = frozenset()
    checksum: int = 0

    def joined_output(self, step: str) -> Any:
        """What the step returned for the whole batch.

        Args:
            step: Its name.
        """
        return join(self.outputs, self.weights, self.sizes, step=step) if self.outputs else None

    @property
    def loss(self) -> float | None:
        """That of the whole batch; None if no microbatch has one."""
        pairs = zip(self.losses, self.loss_weights, strict=True)
        known = [(loss, weight) for loss, weight in pairs if loss is not None]
        return sum(loss * weight for loss, weight in known if weight) if known else None

    def logs(self) -> list[tuple[Entry, float]]:
        """Each entry with its value for the whole batch, of the microbatches that have logged it."""
        return [
            (entry, entry.combine(self.weights if key in self.by_samples else self.loss_weights))
            for key, entry in keyed(self.entries)
        ]


def _branches_apart(rows: Sequence[Given]) -> bool:
    """Whether the step has gone other ways on some shares: it may decide by what is a number of the batch."""
    return len({(row.calls, None in row.losses) for row in rows}) > 1


def _plain(entry: Entry) -> Any:
    """What another rank needs to know of an entry."""
    kwargs = {name: value for name, value in entry.kwargs.items() if isinstance(value, _PLAIN)}
    return entry.name, entry.values, entry.sizes, kwargs, entry.dtype


def _joined(rows: Sequence[Given], rank: int) -> list[Entry]:
    """The entries of all ranks, in the order of the first that has each: those of this rank, with others' values."""
    counts = [len(row.weights) for row in rows]
    named = [[known if isinstance(known, tuple) else _plain(known) for known in row.entries] for row in rows]
    by_rank = [{key: place for place, key in enumerate(keys_of(name for name, *_ in entries))} for entries in named]
    found = []
    for key in dict.fromkeys(key for places in by_rank for key in places):
        values: list[float] = []
        sizes: list[int | None] = []
        for entries, places, count in zip(named, by_rank, counts, strict=True):
            known = entries[places[key]] if key in places else ("", [math.nan] * count, [None] * count)
            values += known[1]
            sizes += known[2]
        if key in by_rank[rank]:
            found.append(rows[rank].entries[by_rank[rank][key]].with_values(values, sizes))
        else:
            owner = next(place for place, places in enumerate(by_rank) if key in places)
            name, _, _, kwargs, dtype = named[owner][by_rank[owner][key]]
            found.append(Entry(name, None, kwargs, values, sizes, dtype))
    return found


def _sent(leaf: Any) -> Any:
    return leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf
