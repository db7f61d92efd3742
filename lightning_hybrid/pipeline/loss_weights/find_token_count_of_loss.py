"""Microbatch weights of the loss by a count of tokens, found from the batches of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_hybrid.pipeline.loss_weights.check_loss_is_microbatch_mean import LossWeighting
from lightning_hybrid.step.batch.denominators import Count, uneven_masks, weights_differ
from lightning_hybrid.step.batch.split import (
    BatchSplitter,
    batch_size_of,
    neighbouring_microbatches,
    split,
)

_MAX_TRIED = 8  # masks that turned out not to be those of the loss


class LossWeightFinder:
    """Finds the weights of microbatches in the loss of one step.

    Attributes:
        now: The weighting found so far.
    """

    def __init__(self, splitter: BatchSplitter | None, inform: Callable[[str], None]) -> None:
        """Set up for the user's ``splitter`` of batches; ``inform`` prints a message on the first rank."""
        self.now = LossWeighting()
        self._splitter, self._inform = splitter, inform
        self._tried = set[Count]()

    def is_open(self, batch: Any, count: int) -> bool:
        """Whether a batch can show a weighting that is not known yet.

        Args:
            batch: The full batch.
            count: Number of microbatches to split it into.
        """
        if not self._can_be_split(batch, count):
            return False
        if self.now.counts:
            return weights_differ(self.now.counts, split(batch, count, self._splitter)[0])
        return len(self._tried) < _MAX_TRIED and bool(self._new_masks(batch, count))

    def two_parts(self, batch: Any, count: int) -> Any:
        """Two neighbours of ``count`` microbatches, as one batch; a pair with different mask counts if there is one.

        A splitter of the user has no rows to take: then it is one of half as many parts.
        """
        if self._splitter is None and count > 1 and self._can_be_split(batch, count):
            pairs = neighbouring_microbatches(batch, count)
        else:
            pairs = split(batch, max(1, count // 2), self._splitter)[0]
        return next((pair for pair in pairs if self.is_open(pair, 2)), pairs[0])

    def learn(self, found: LossWeighting, batch: Any, count: int) -> None:
        """Adopt the weighting that a batch has shown; arguments as for ``is_open``."""
        if self._can_be_split(batch, count):
            self._tried |= self._new_masks(batch, count)
        if found.mixes:
            self.now = found
        elif found.counts:
            if not self.now.counts:
                self._inform(found.describe(batch))
            self.now = found._replace(counts=tuple(c for c in found.counts if c in self.now.counts) or found.counts)
        else:
            self.now = self.now._replace(counts=self.now.counts[:1])
        self.now = self.now._replace(reductions=found.reductions or self.now.reductions)

    def _can_be_split(self, batch: Any, count: int) -> bool:
        size = batch_size_of(batch)
        return count > 1 and (self._splitter is not None or (size is not None and size >= count))

    def _new_masks(self, batch: Any, count: int) -> set[Count]:
        return uneven_masks(batch, *split(batch, count, self._splitter)) - self._tried
