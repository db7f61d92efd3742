"""How a layout cuts the data of a run, which its reference does too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Cut:
    """How a layout cuts the data.

    Attributes:
        replicas: How many batches a step takes.
        num_microbatches: Parts of each; None where the strategy chooses.
        num_stages: Which that choice depends on.
        splitter: The user's ``batch_splitter``.
        weight: The user's ``microbatch_weight``.
        at_once: Steps that run on the whole batch of a replica, whatever the number of parts.
        shares: Ranks that each run training steps on a share of a replica's batch, and its parts.
        plain: Whether each rank runs the step as it is.
        start: Training batches before this one are not cut: their step did not run in stages yet.
        end: From this one on the step does not any more: on shares then, or whole if there is one. None if it does.
    """

    replicas: int
    num_microbatches: int | None
    num_stages: int
    splitter: Callable[[Any, int], Sequence[Any]] | None = None
    weight: Callable[[Any], float] | None = None
    at_once: frozenset[str] = frozenset()
    shares: int = 1
    plain: bool = False
    start: int = 0
    end: int | None = None

    def has_ended(self, number: int) -> bool:
        """Whether a training batch runs on ranks that hold shards."""
        return self.plain and (self.end is None or number >= self.end)

    def is_whole(self, number: int, size: int | None) -> bool:
        """Whether a training batch of so many samples runs whole."""
        if number < self.start:
            return True
        if not self.has_ended(number) or (self.end is None and self.shares == 1):
            return False
        few = self.splitter is None and (size or 0) < self.shares
        return self.shares == 1 or number == (self.end or 0) or few
