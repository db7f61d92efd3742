"""The data split of a layout: replicas, microbatches and shares of the batch, which its reference imitates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class DataSplit:
    """How a layout splits the data.

    Attributes:
        replicas: Number of replicas, so of batches per step.
        num_microbatches: Microbatches of each batch; None where the strategy chooses.
        num_stages: Number of stages, on which that choice depends.
        splitter: The user's ``batch_splitter``.
        weight: The user's ``microbatch_weight``.
        unsplit_steps: Steps that run on the full batch of a replica, whatever the number of microbatches.
        shares: Number of ranks that each run training steps on a share of a replica's batch, in microbatches.
        plain: Whether each rank runs the user's step as it is, without stages.
        start: Training batches before this one are not split: their step did not run in stages yet.
        end: From this batch on the step does not run in stages any more, but on shares, or unsplit if there is one
            share. None if it does.
        joined: Whether each replica's batch runs unsplit, with BatchNorm's statistics per microbatch.
    """

    replicas: int
    num_microbatches: int | None
    num_stages: int
    splitter: Callable[[Any, int], Sequence[Any]] | None = None
    weight: Callable[[Any], float] | None = None
    unsplit_steps: frozenset[str] = frozenset()
    shares: int = 1
    plain: bool = False
    start: int = 0
    end: int | None = None
    joined: bool = False

    def has_left_stages(self, number: int) -> bool:
        """Whether a training batch runs on ranks that hold shards."""
        return self.plain and (self.end is None or number >= self.end)

    def is_unsplit(self, number: int, size: int | None) -> bool:
        """Whether training batch ``number``, of ``size`` samples, runs unsplit."""
        if number < self.start:
            return True
        if not self.has_left_stages(number) or (self.end is None and self.shares == 1):
            return False
        few = self.splitter is None and (size or 0) < self.shares
        return self.shares == 1 or number == (self.end or 0) or few
