"""Rendezvous of ranks before a collective, by the store of a run; its polls cost the same for any number of ranks.

What a poll reads shows whether any other rank has gone on, or waits elsewhere for this one. Only then, or when the time
is over, is the progress of each rank read: all of it in two requests.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_hybrid.collectives.arrivals import wait_until
from lightning_hybrid.errors import NotOnAllRanks
from lightning_hybrid.mesh import Mesh
from lightning_hybrid.strategies.world.stop import SIGTERM

# The others usually come within this time; then it is asked whether they may not.
_SECONDS_TO_ASK = 0.1
# Outside of a run no rank records progress: the others have this time to come.
_SECONDS_OUTSIDE_OF_RUNS = 4.0
_SECONDS_UNTIL_TOLD = 10.0
# Time after a SIGTERM in which the ranks that are waited for may still come: they stop after one batch.
_SECONDS_TO_STOP = 10.0
# The latest collectives that some rank of a replica, or of the world, has gone on to: one key for each of so many.
_SLOTS = 64


class Rendezvous:
    """Progress of this rank in a run, and of the others.

    ``timeout`` is for ranks that do not come; none is waited for after one of the ``failures``.
    """

    def __init__(self, trainer: Any, mesh: Mesh, store: dist.Store, timeout: timedelta, failures: Any) -> None:
        self._trainer, self._mesh, self._store, self._timeout = trainer, mesh, store, timeout
        self._is_over = failures.any_reported
        self._passed = self._passed_by_all = self._recorded = 0
        self._met, self._checksums = Counter[str](), Counter[str]()  # calls so far, by their ranks
        replica = mesh.layout.data_rank(mesh.rank)
        self._passed_here, self._recorded_here = f"passed-{replica}", f"recorded-{replica}"

    def passes(self, *, in_all_replicas: bool = False) -> None:
        """Record that this rank goes on to a collective; a message that no rank waits for.

        Where replicas have different numbers of batches, in validation, these are not ``in_all_replicas``.
        """
        in_all_replicas |= self._trainer.training
        self._passed += 1
        self._passed_by_all += in_all_replicas
        with contextlib.suppress(RuntimeError):  # the store is gone with the rank that hosts it
            self._store.set(f"at-{self._mesh.rank}", f"{self._passed} {self._passed_by_all}")
            self._store.set(_slot(self._passed_here, self._passed), str(self._passed))
            if in_all_replicas:
                self._store.set(_slot("passed-by-all", self._passed_by_all), str(self._passed_by_all))

    def has_recorded(self) -> None:
        """Record that this rank could record a step; a message that no rank waits for."""
        self._set_recorded(is_done=True)

    def fails_alone(self) -> bool:
        """Wait until all ranks of this replica have tried to record a step, which has failed on this one.

        Returns whether it has not failed on all of them, so that this rank cannot go on with the others.
        """
        self._set_recorded(is_done=False)
        size = self._mesh.layout.world_size // self._mesh.layout.data_parallel_size

        def count(outcome: str) -> int:
            return self._store.add(f"{self._recorded_here}-{self._recorded}-{outcome}", 0)

        with contextlib.suppress(RuntimeError):  # the store is gone with the rank that hosts it
            have_all_failed, seconds = lambda: count("failed") == size, self._timeout.total_seconds()
            return not wait_until(have_all_failed, seconds, lambda: self._is_over() or count("done") > 0)
        return True

    def _set_recorded(self, *, is_done: bool) -> None:
        self._recorded += 1
        with contextlib.suppress(RuntimeError):
            self._store.add(f"{self._recorded_here}-{self._recorded}-{'done' if is_done else 'failed'}", 1)

    @property
    def reached(self) -> tuple[int, int]:
        """The collectives that this rank has gone on to, and those that all replicas go on to."""
        return self._passed, self._passed_by_all

    def catch_up(self, passed: int, passed_by_all: int) -> None:
        """Record the progress that is furthest on any rank: some were stopped earlier than others."""
        self._passed, self._passed_by_all = passed, passed_by_all

    def meet(self, what: str, ranks: Sequence[int] | None = None, *, compares: bool = True, asks: bool = True) -> None:
        """Wait until ranks (None: all) are here, to make the call ``what``, or one has failed.

        Either they make the same call, or they compare their calls afterwards and not here (``compares=False``). Where
        one rank may have more hooks than others, it must not ask for their progress (``asks=False``).

        Raises:
            NotOnAllRanks: Another rank has gone on, makes another call, or has not come within the timeout.
        """
        ranks = range(self._mesh.layout.world_size) if ranks is None else ranks
        if len(ranks) == 1:
            return
        key = _key(ranks, compares=compares)
        self._met[key] += 1
        # No rank is more than one call ahead of another, so that two sums of checksums are enough.
        call, checksum = f"sum-{self._met[key] % 2}-{key}", zlib.crc32(what.encode()) if compares else 0
        with self._losing_the_store(what, len(ranks)):
            self._store.set(f"waits-{self._mesh.rank}", f"{key} {self._met[key]} {what}")
            self._store.add(call, checksum)
            self._checksums[call] += checksum
            absent = self._wait(what, ranks, key, asks=asks)
            if absent is None:
                self._check_not_left(what, len(ranks))
                return
            if absent:
                self._store.add(f"arrived-{key}", -1)
                self._met[key] -= 1
            elif self._store.add(call, 0) != len(ranks) * self._checksums[call]:
                absent = {rank: f"make another call, {what}" for rank, (_, _, what) in self._calls_of(ranks).items()}
                absent.pop(self._mesh.rank)
            if absent:
                self._store.add(call, -checksum)
                self._checksums[call] -= checksum
                others = {reason: [rank for rank in absent if absent[rank] == reason] for reason in absent.values()}
                reasons = "; ".join(f"ranks {found} {reason}" for reason, found in others.items())
                raise self._left_alone(what, len(ranks), reasons)

    @contextlib.contextmanager
    def _losing_the_store(self, what: str, count: int) -> Iterator[None]:
        try:
            yield
        except dist.DistNetworkError:  # the store is gone with the rank that hosts it
            self._check_not_left(what, count)

    def _check_not_left(self, what: str, count: int) -> None:
        """Refuse a call after a run that others have left; in a run the collective that follows gives the reason."""
        if self._trainer.state.status == TrainerStatus.FINISHED:
            raise self._left_alone(what, count, "others have ended") from None

    def _left_alone(self, what: str, count: int, reasons: str) -> NotOnAllRanks:
        return NotOnAllRanks(
            f"{what} on rank {self._mesh.rank} needs all {count} ranks, since each has only its own shard or batches,"
            f" but {reasons}; make the same calls on all ranks, without `if trainer.is_global_zero:`; only the first"
            " writes files",
            entry="save-ranks",
        )

    def _wait(self, what: str, ranks: Sequence[int], key: str, *, asks: bool) -> dict[int, str] | None:
        """Wait until all ranks have arrived; returns the ranks that do not come, with reasons; None after a failure.

        Raises:
            SIGTERMException: The job has been told to end, and they still have not.
        """
        wanted, start, is_told = self._met[key] * len(ranks), time.monotonic(), False
        timeout = self._timeout.total_seconds()
        if self._trainer.state.status != TrainerStatus.RUNNING:
            timeout = min(timeout, _SECONDS_OUTSIDE_OF_RUNS)
        absent: dict[int, str] = {}
        arrived, reads_at, stops_at = self._store.add(f"arrived-{key}", 1), _SECONDS_TO_ASK, math.inf

        def is_decided() -> bool:
            nonlocal absent, arrived, is_told, reads_at, stops_at
            if arrived >= wanted or self._is_over():
                return True
            waited, missing = time.monotonic() - start, dict[int, str]()
            tells = waited > _SECONDS_UNTIL_TOLD and not is_told
            if waited > _SECONDS_UNTIL_TOLD and self._store.check([SIGTERM]):
                stops_at = min(stops_at, waited + _SECONDS_TO_STOP)
                if waited > stops_at:
                    raise SIGTERMException
            if waited > timeout or tells or (waited > reads_at and self._may_be_left(key, asks=asks)):
                missing, reads_at = self._missing(ranks, key, asks=asks), 2 * waited
            if waited > timeout:
                missing = {rank: why or f"have not come within {waited:.0f} s" for rank, why in missing.items()}
            arrived = self._store.add(f"arrived-{key}", 0)  # after the progress, which is later
            if arrived < wanted:
                absent = {rank: why for rank, why in missing.items() if why}
            if tells:
                is_told = True
                told = f"rank {self._mesh.rank} has waited {waited:.0f} s for ranks {list(missing)} in {what}"
                print(told, file=sys.stderr, flush=True)
            return bool(absent) or arrived >= wanted

        wait_until(is_decided, math.inf)
        return {} if arrived >= wanted else absent or None

    def _may_be_left(self, key: str, *, asks: bool) -> bool:
        """Whether any rank has gone on from here, or waits for this one in another call; cheap, and it may be wrong."""
        reached = ((self._passed_here, self._passed + 1), ("passed-by-all", self._passed_by_all + 1)) if asks else ()
        if any(self._is_reached(name, number) for name, number in reached):
            return True
        others = {other: size for other, size in self._sizes().items() if other != key}
        return any(self._store.add(f"arrived-{other}", 0) > self._met[other] * size for other, size in others.items())

    def _sizes(self) -> dict[str, int]:
        """The calls that need this rank, and how many ranks each needs."""
        groups = [dist.get_process_group_ranks(group) for group in self._mesh.groups if group.size() > 1]
        return {_key(ranks, compares=compares): len(ranks) for ranks in groups for compares in (True, False)}

    def _is_reached(self, name: str, number: int) -> bool:
        """Whether any of the ranks that share a name has gone on to the collective of this number."""
        slot = _slot(name, number)
        return self._store.check([slot]) and int(self._store.get(slot)) >= number

    def _missing(self, ranks: Sequence[int], key: str, *, asks: bool) -> dict[int, str]:
        """What ranks do that have not come; "" while they may still come."""
        calls, needing, missing = self._calls_of(ranks), self._sizes(), {}
        for rank, at in zip(ranks, self._read("at", ranks) if asks else [b""] * len(ranks), strict=True):
            its_key, number, what = calls[rank]
            if its_key == key and number >= self._met[key]:
                continue
            if its_key in needing and number > self._met[its_key]:
                missing[rank] = f"wait for this one in {what}"
            else:
                missing[rank] = "have continued without it" if at and self._is_behind(rank, at) else ""
        return missing

    def _calls_of(self, ranks: Sequence[int]) -> dict[int, tuple[str, int, str]]:
        """The latest calls for which ranks have waited: the ranks needed, the number so far, and the name."""
        rows = [(row or b" 0 ").decode(errors="replace").split(" ", 2) for row in self._read("waits", ranks)]
        return {rank: (key, int(number), what) for rank, (key, number, what) in zip(ranks, rows, strict=True)}

    def _read(self, name: str, ranks: Sequence[int]) -> list[bytes]:
        """What each rank has recorded under a name, b"" where nothing; in two requests if all have."""
        keys = [f"{name}-{rank}" for rank in ranks]
        if self._store.check(keys):
            return list(self._store.multi_get(keys))
        return [self._store.get(key) if self._store.check([key]) else b"" for key in keys]

    def _is_behind(self, rank: int, at: bytes) -> bool:
        """Whether this rank is behind the progress ``at`` of another one."""
        layout, here = self._mesh.layout, self._mesh.rank
        passed, by_all = map(int, at.split())
        same_replica = layout.data_rank(rank) == layout.data_rank(here)
        return passed > self._passed if same_replica else by_all > self._passed_by_all


def _key(ranks: Sequence[int], *, compares: bool) -> str:
    """Name of the calls of these ranks; calls that compare more afterwards are counted by themselves."""
    digest = zlib.crc32(",".join(map(str, ranks)).encode())
    return f"{'call' if compares else 'read'},{ranks[0]},{len(ranks)},{digest:x}"


def _slot(name: str, number: int) -> str:
    return f"{name}-{number % _SLOTS}"
