"""Shares of a batch: the ranks of a pipeline each run the user's step on some samples, where it cannot be partitioned.

Their losses are weighted by their numbers of samples, so that gradients are those of the full batch where the loss is
a mean over samples. Logged values and outputs are gathered on every one of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from lightning_hybrid.collectives.agreement import batches_differ, digest
from lightning_hybrid.pipeline.loss_weights.check_loss_is_microbatch_mean import LossWeighting
from lightning_hybrid.pipeline.microbatch_results import CHANGES_MODULES, MicrobatchResults
from lightning_hybrid.pipeline.results.log_entry import Entry, keys_of
from lightning_hybrid.pipeline.side_effects.join_appended_entries import merged
from lightning_hybrid.step.batch.metrics import joined_calls
from lightning_hybrid.step.batch.split import BatchSplitter, batch_size_of, split
from lightning_hybrid.step.objects.pytree import flatten, map_leaves
from lightning_hybrid.step.objects.tensors import on_host

_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class BatchShare:
    """The share of a batch that one rank runs.

    Attributes:
        microbatches: Run one after the other.
        weights: Their fractions of the samples; over all ranks they sum to 1.
        loss_weights: The weights of their losses in that of the full batch; over all ranks they sum to 1.
        first: Index of the first microbatch among those of the full batch.
        total: Number of microbatches of the full batch.
        ranks: Number of ranks that share the batch; 1 if each of them runs all of it.
        checksum: Checksum of the full batch.
    """

    microbatches: Sequence[Any]
    weights: Sequence[float]
    loss_weights: Sequence[float]
    first: int = 0
    total: int = 1
    ranks: int = 1
    checksum: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether this rank runs all of several microbatches."""
        return self.ranks == 1 < self.total


class BatchSharing:
    """The ranks that share the batches of one replica.

    Attributes:
        rank: The index of this rank.
        size: The number of ranks.
        everyone: These ranks and those of other replicas.
        are_all: Whether there are no other replicas.
    """

    def __init__(self, group: dist.ProcessGroup, everyone: dist.ProcessGroup) -> None:
        """``everyone`` adds the ranks of other replicas to ``group``: they hold shards of the same parameters."""
        self._group, self.everyone = group, everyone
        self.rank, self.size = group.rank(), group.size()
        self.are_all = group.size() == everyone.size()

    def of(self, batch: Any, count: int, splitter: BatchSplitter | None, weighting: LossWeighting) -> BatchShare:
        """This rank's share of a batch; all of it where there is not a sample for each rank.

        Args:
            batch: The same on all ranks.
            count: Number of microbatches that each rank splits its share into.
            splitter: Splits batches, where the user has passed one.
            weighting: The weights of microbatches in the loss.
        """
        count = self.count(batch, count, splitter)
        if not count:
            return BatchShare([batch], [1.0], [1.0])
        first, total = self.rank * count, self.size * count
        parts, weights = split(batch, total, splitter)
        here, loss_weights = slice(first, first + count), weighting.of(parts, weights)
        checksum = digest(flatten(batch)[0]) if self.size > 1 else 0
        return BatchShare(parts[here], weights[here], loss_weights[here], first, total, self.size, checksum)

    def count(self, batch: Any, count: int, splitter: BatchSplitter | None) -> int:
        """Microbatches of each share; 0 where there is not a sample for each rank. Arguments as for ``of``."""
        size = batch_size_of(batch)
        if splitter is not None or (self.size == 1 and size is None):
            return count
        return 0 if size is None else min(count, size // self.size)

    def any_rank(self, condition: bool) -> bool:
        """Whether a condition holds on any rank of any replica; collective over all of them."""
        return bool(self.max_over_ranks(int(condition)))

    def max_over_ranks(self, number: int) -> int:
        """The largest number of all ranks of all replicas; collective over them."""
        rows: list[Any] = [None] * self.everyone.size()
        dist.all_gather_object(rows, number, group=self.everyone)
        return max(rows)

    def gather(self, local: MicrobatchResults) -> MicrobatchResults:
        """All-gather the results of a step that each rank has run on a share; collective.

        Args:
            local: The results of this rank.

        Raises:
            RanksDisagree: The ranks have different batches.
        """
        rows: list[Any] = [None] * self.size
        entries: Any = [_picklable(entry) for entry in local.entries]
        outputs, appended = map_leaves(on_host, local.outputs), map_leaves(on_host, local.appended)
        calls = map_leaves(on_host, local.metric_calls)
        sent = replace(local, entries=entries, outputs=outputs, appended=appended, metric_calls=calls)
        dist.all_gather_object(rows, sent, group=self._group)
        rows[self.rank] = local
        if len({row.checksum for row in rows}) > 1:
            raise batches_differ([row.checksum for row in rows])
        return MicrobatchResults(
            weights=[weight for row in rows for weight in row.weights],
            loss_weights=[weight for row in rows for weight in row.loss_weights],
            by_samples=local.by_samples,
            reductions=local.reductions,
            entries=_joined_entries(rows, self.rank),
            losses=[loss for row in rows for loss in row.losses],
            sizes=[size for row in rows for size in row.sizes],
            outputs=[output for row in rows for output in row.outputs],
            appended=merged([row.appended for row in rows], [len(row.weights) for row in rows]),
            metric_calls=joined_calls([(len(row.weights), row.metric_calls) for row in rows]),
            news=CHANGES_MODULES if _branches_differ(rows) else max(row.news for row in rows),
        )


def _branches_differ(rows: Sequence[MicrobatchResults]) -> bool:
    """Whether the step took different branches on some shares: it may decide by a number of the batch."""
    return len({(row.calls, None in row.losses) for row in rows}) > 1


def _picklable(entry: Entry) -> Any:
    """The fields of an entry that other ranks need, as a picklable tuple."""
    kwargs = {name: value for name, value in entry.kwargs.items() if isinstance(value, _PLAIN)}
    return entry.name, entry.values, entry.sizes, kwargs, entry.dtype


def _joined_entries(rows: Sequence[MicrobatchResults], rank: int) -> list[Entry]:
    """The entries of all ranks with their values by microbatch, in the order of the first rank that has each."""
    counts = [len(row.weights) for row in rows]
    named = [[entry if isinstance(entry, tuple) else _picklable(entry) for entry in row.entries] for row in rows]
    by_rank = [{key: index for index, key in enumerate(keys_of(name for name, *_ in entries))} for entries in named]
    joined = []
    for key in dict.fromkeys(key for indices in by_rank for key in indices):
        values: list[float] = []
        sizes: list[int | None] = []
        for entries, indices, count in zip(named, by_rank, counts, strict=True):
            entry = entries[indices[key]] if key in indices else ("", [math.nan] * count, [None] * count)
            values += entry[1]
            sizes += entry[2]
        if key in by_rank[rank]:
            joined.append(rows[rank].entries[by_rank[rank][key]].with_values(values, sizes))
        else:
            owner = next(other for other, indices in enumerate(by_rank) if key in indices)
            name, _, _, kwargs, dtype = named[owner][by_rank[owner][key]]
            joined.append(Entry(name, None, kwargs, values, sizes, dtype))
    return joined
