"""Microbatch weights of the loss by a count of tokens, as far as the batches of a run have shown it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_hybrid.pipeline.loss_weights.mixed_objectives import Weighing
from lightning_hybrid.step.batch.microbatch import BatchSplitter, batch_size_of, split
from lightning_hybrid.step.batch_means.counts_in_batch import Count, are_apart, uneven_masks

_MOST_TRIED = 8  # masks that turned out to be none of the loss


class LossWeighing:
    """What is known of one step.

    Attributes:
        now: How parts weigh.
    """

    def __init__(self, splitter: BatchSplitter | None, inform: Callable[[str], None]) -> None:
        """Args: splitter: the user's, for batches. inform: tells the user, on the first rank."""
        self.now = Weighing()
        self._splitter, self._inform = splitter, inform
        self._tried = set[Count]()

    def is_open(self, batch: Any, count: int) -> bool:
        """Whether a batch can show what parts weigh by, which is not known yet.

        Args:
            batch: The batch.
            count: Parts that it is to be cut into.
        """
        if not self._can_be_cut(batch, count):
            return False
        if self.now.counts:
            return are_apart(self.now.counts, split(batch, count, self._splitter)[0])
        return len(self._tried) < _MOST_TRIED and bool(self._new_masks(batch, count))

    def two_parts(self, batch: Any, count: int) -> Any:
        """Two neighbours of so many parts in one: two that a mask leaves other shares of, if there are such."""
        pairs = split(batch, max(1, count // 2), self._splitter)[0]
        return next((pair for pair in pairs if self.is_open(pair, 2)), pairs[0])

    def learn(self, found: Weighing, batch: Any, count: int) -> None:
        """Go by what a batch has shown; arguments as for ``is_open``."""
        if self._can_be_cut(batch, count):
            self._tried |= self._new_masks(batch, count)
        if found.mixes:
            self.now = found
        elif found.counts:
            if not self.now.counts:
                self._inform(str(found))
            self.now = found._replace(counts=tuple(c for c in found.counts if c in self.now.counts) or found.counts)
        else:
            self.now = self.now._replace(counts=self.now.counts[:1])

    def _can_be_cut(self, batch: Any, count: int) -> bool:
        size = batch_size_of(batch)
        return count > 1 and (self._splitter is not None or (size is not None and size >= count))

    def _new_masks(self, batch: Any, count: int) -> set[Count]:
        return uneven_masks(batch, *split(batch, count, self._splitter)) - self._tried
