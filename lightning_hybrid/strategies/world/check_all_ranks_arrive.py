"""A rendezvous of ranks before a collective of the whole world; an error where some have gone on.

Ranks also compare whether they could record a step: one on which the user's code raises must not wait for messages of
ranks on which it does not.

``if trainer.is_global_zero: trainer.save_checkpoint(...)`` asks one rank for what only all of them have. The others do
not come: their messages of the next step would meet those of the checkpoint. So a rank first records in the store that
it is there, and waits. A rank that is seen to go past that moment will not come any more.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_hybrid.collectives.wait_for_arrivals import pauses
from lightning_hybrid.errors import NotOnAllRanks
from lightning_hybrid.mesh import Mesh

# The others usually come within this time; then their progress is read.
_SECONDS_TO_ASK = 0.1


class Rendezvous:
    """Progress of this rank in a run, and of the others."""

    def __init__(self, trainer: Any, mesh: Mesh, store: dist.Store) -> None:
        self._trainer, self._mesh, self._store = trainer, mesh, store
        self._met = self._passed = self._trained = self._recorded = 0
        self._is_needed = any(mesh.size(axis) > 1 for axis in ("pp", "holders"))

    def passes(self) -> None:
        """Record that this rank goes on to a collective; a message that no rank waits for."""
        if self._is_needed:
            self._passed += 1
            self._trained += self._trainer.training  # replicas have different numbers of batches in validation
            with contextlib.suppress(RuntimeError):  # the store is gone with the rank that hosts it
                self._store.set(f"at-{self._mesh.rank}", f"{self._passed} {self._trained}")

    def has_recorded(self) -> None:
        """Record that this rank could record a step; a message that no rank waits for."""
        self._set_recorded(is_done=True)

    def fails_alone(self, timeout: timedelta, is_over: Callable[[], bool]) -> bool:
        """Wait until all ranks of this replica have tried to record a step, which has failed on this one.

        Args:
            timeout: For ranks that do not try.
            is_over: Returns whether a rank has failed; then no rank is waited for.

        Returns:
            Whether it has not failed on all of them, so that this rank cannot go on with the others.
        """
        self._set_recorded(is_done=False)
        layout, here = self._mesh.layout, self._mesh.rank
        replica = [rank for rank in range(layout.world_size) if layout.data_rank(rank) == layout.data_rank(here)]
        start, pause = time.monotonic(), pauses()
        with contextlib.suppress(RuntimeError):  # the store is gone with the rank that hosts it
            while waited_for := [rank for rank in replica if self._outcome(rank) != (self._recorded, 0)]:
                is_done = any(self._outcome(rank) >= (self._recorded, 1) for rank in waited_for)
                if is_done or is_over() or time.monotonic() - start > timeout.total_seconds():
                    return True
                next(pause)
            return False
        return True

    def _set_recorded(self, *, is_done: bool) -> None:
        self._recorded += 1
        with contextlib.suppress(RuntimeError):
            self._store.set(f"recorded-{self._mesh.rank}", f"{self._recorded} {int(is_done)}")

    def _outcome(self, rank: int) -> tuple[int, ...]:
        """The number of the latest recording that a rank has tried, and whether it was done."""
        name = f"recorded-{rank}"
        return tuple(map(int, self._store.get(name).split())) if self._store.check([name]) else (0, 0)

    def catch_up(self, largest: Callable[[float], float]) -> None:
        """Record the same progress on all ranks: some were stopped earlier than others; ``largest`` is over ranks."""
        self._passed, self._trained = int(largest(self._passed)), int(largest(self._trained))

    def meet(self, what: str, timeout: timedelta, is_over: Callable[[], bool]) -> None:
        """Wait until all ranks are here, to make the call ``what``, or one has failed (``is_over``).

        Raises:
            NotOnAllRanks: Another rank has gone on, or not come within the timeout.
        """
        if not self._is_needed:
            return
        self._met += 1
        ranks = range(self._mesh.layout.world_size)
        start, pause = time.monotonic(), pauses()
        with contextlib.suppress(dist.DistNetworkError):
            self._store.set(f"met-{self._mesh.rank}", str(self._met))
            arrived = self._store.add(f"arrived-{self._met}", 1)
            while arrived < len(ranks) and not is_over():
                waited = time.monotonic() - start
                late = waited > timeout.total_seconds()
                gone = [rank for rank in ranks if self._is_gone(rank, late)] if waited > _SECONDS_TO_ASK else []
                if gone:
                    raise NotOnAllRanks(
                        f"{what} on rank {self._mesh.rank} needs all {len(ranks)} ranks, since each has only its own"
                        f" shard, but ranks {gone} "
                        + (f"have not come within {waited:.0f} s" if late else "have continued without it")
                        + "; call it on all ranks: only the first writes the file",
                        entry="save-ranks",
                    )
                next(pause)
                arrived = self._store.add(f"arrived-{self._met}", 0)

    def _is_gone(self, rank: int, late: bool) -> bool:
        """Whether another rank has passed this moment; its progress must be read before its arrival."""
        layout, here = self._mesh.layout, self._mesh.rank
        at = self._store.get(f"at-{rank}").split() if self._store.check([f"at-{rank}"]) else (0, 0)
        passed, trained = map(int, at)
        same_replica = layout.data_rank(rank) == layout.data_rank(here)
        ahead = passed > self._passed if same_replica else trained > self._trained
        if not ahead and not late:
            return False
        known = self._store.check([f"met-{rank}"])
        return not known or int(self._store.get(f"met-{rank}")) < self._met
