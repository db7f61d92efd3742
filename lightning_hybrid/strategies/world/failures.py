"""Failures of ranks: each rank learns of other ranks' failures, and of ranks that do not arrive."""

from __future__ import annotations

import contextlib
import math
import re
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_hybrid.collectives.arrivals import store_of_run, wait_until
from lightning_hybrid.errors import NotOnAllRanks, add_error_note, error_notes_of
from lightning_hybrid.mesh import Mesh, is_lost_connection
from lightning_hybrid.shared_memory.sockets import close_peer_sockets
from lightning_hybrid.strategies.world.callbacks import RunCallback
from lightning_hybrid.strategies.world.stop import GracefulStop, SlurmRequeue

# Time for the others to fail by themselves, as they do where all ranks make the same mistake.
_SECONDS_FOR_PEERS = 1.0
# Time that the rank which may host the store stays, for the others to read why it failed.
_SECONDS_FOR_READERS = 2.0
_SHOWN_CHARS = 500
# Why the connections of a world were closed; one that is made anew is another.
_closed: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
# No transfer has this tag.
_NEVER_SENT = 0x7FFFFFFE
_HOOK_CALLERS = ("_call_lightning_module_hook", "_call_callback_hooks", "_call_strategy_hook")


class NoFailures:
    """The failures of other ranks where there are none, and so nothing to record or to wait for."""

    is_disconnected = False
    reached = 0, 0

    @property
    def rendezvous(self) -> NoFailures:
        """With no other rank."""
        return self

    def report(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    passes = has_recorded = meet = catch_up = report

    def any_reported(self) -> bool:
        """No."""
        return False

    fails_alone = any_reported


class RankFailures(RunCallback):
    """Failures of several ranks; runs before the user's callbacks, which may wait for ranks that this one wakes.

    Attributes:
        is_disconnected: Whether this rank has closed its connections, so that no collective can succeed any more.
        rendezvous: Synchronizes ranks before a collective of the whole world.
    """

    def __init__(self, trainer: Any, mesh: Mesh, timeout: timedelta) -> None:
        self.is_disconnected = False
        self._trainer = trainer
        self._mesh = mesh
        self._store = store_of_run("run", mesh.rank)
        self._reported = False
        self._leave = self.enter(trainer)
        self._requeue = SlurmRequeue(trainer, self._store)
        self.rendezvous = Rendezvous(trainer, mesh, self._store, timeout, self)
        self._stopping = GracefulStop(trainer, mesh, self._store, timeout, self)

    def stop_watching(self) -> None:
        """Undo the changes to the trainer."""
        self._leave()
        self._requeue.stop_listening()
        self._stopping.stop_listening()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Lightning's hook."""
        self.report(exception)

    def report(self, error: BaseException) -> None:
        """Report the error that ends the run here, so that no rank waits for this one; note which rank failed first."""
        if self._reported:
            return
        self._reported = True
        here = self._where(error)
        lost = is_lost_connection(error)
        cause = f"another rank has died silently, as {here} found" if lost else f"{here} failed: {_brief(error)}"
        first = self._publish(cause)
        if lost:
            reason = "another rank of the job has died silently (killed, or out of memory)" if first == cause else first
            add_error_note(error, f"{here} had to stop: {reason}")
            self._close(reason)
        elif not self._all_reported(_SECONDS_FOR_PEERS):
            self._close(first)
            if self._mesh.rank == 0:
                self._all_reported(_SECONDS_FOR_READERS)

    def _publish(self, cause: str) -> str:
        """Publish a reason unless there is one already; return the one that stands."""
        with contextlib.suppress(RuntimeError):  # the store is gone with the rank that hosts it
            first = self._store.compare_set("reason", "", cause).decode(errors="replace")
            self._store.add("failed", 1)
            return first
        return cause

    def any_reported(self) -> bool:
        """Whether a rank has failed."""
        with contextlib.suppress(RuntimeError):
            return self._store.add("failed", 0) > 0
        return True

    def _all_reported(self, seconds: float) -> bool:
        size = self._mesh.layout.world_size
        with contextlib.suppress(RuntimeError):
            return wait_until(lambda: self._store.add("failed", 0) >= size, seconds)
        return False

    def _close(self, reason: str) -> None:
        """Close this rank's connections; ranks that wait for it get an error."""
        self.is_disconnected = True
        world: Any = dist.group.WORLD
        _closed[world] = reason
        for group in {id(group): group for group in (world, *self._mesh.groups)}.values():
            if group.size() > 1:
                _close_group(group)

    def _where(self, error: BaseException) -> str:
        size = self._mesh.size("pp")
        rank = f"rank {self._mesh.rank} (pipeline rank {self._mesh.rank_in('pp')} of {size})"
        for text in error_notes_of(error):
            place = re.match(r"on pipeline rank \d+, (.*)", text)
            if place:
                return f"{rank} in {place[1]}"
        hook = _hook_of(error)
        return f"{rank} in {hook}" if hook else rank

    def _on_batch_start(self, *_: Any, **__: Any) -> None:
        self._stopping.on_batch_start()
        self.rendezvous.passes()

    on_train_batch_start: Callable[..., None] = _on_batch_start
    on_validation_batch_start: Callable[..., None] = _on_batch_start
    on_test_batch_start: Callable[..., None] = _on_batch_start
    on_predict_batch_start: Callable[..., None] = _on_batch_start


def check_connections() -> None:
    """Check that no run that failed has closed the connections of this process."""
    reason = _closed.get(dist.group.WORLD) if dist.is_available() and dist.is_initialized() else None
    if reason is not None:
        raise RuntimeError(
            f"a run in this process failed, and its connections to the other ranks were closed: {reason}; start the"
            " script again to continue"
        )


def warn_of_missing_checkpoint(path: Any) -> None:
    """Warn that a checkpoint requested after a failure is not written."""
    rank_zero_warn(
        f"no checkpoint is written to {path}: a rank has failed, and the parameters of its stage cannot be reached;"
        " resume from the last checkpoint of the run"
    )


def close_connections(group: dist.ProcessGroup) -> None:
    """Close all connections of a group of backend gloo on this rank, so that ranks that wait for it get an error."""
    # [Note: closing gloo] Neither abort nor destroy_process_group closes sockets of gloo while anything still refers to
    # the group. A receive that runs out of time does: gloo then closes all connections of the group.
    # From a peer that is gone it fails at once and closes nothing, so every peer is tried.
    for peer in range(group.size()):
        if peer != group.rank():
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1)], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))


def _close_group(group: dist.ProcessGroup) -> None:
    close_peer_sockets(group)
    if dist.get_backend(group) == "gloo":
        close_connections(group)
        return
    with contextlib.suppress(RuntimeError):
        group.abort()


def _hook_of(error: BaseException) -> str:
    """Return the innermost hook that an error came through."""
    hook, frames = "", error.__traceback__
    while frames is not None:
        if frames.tb_frame.f_code.co_name in _HOOK_CALLERS:
            hook = frames.tb_frame.f_locals.get("hook_name", hook)
        frames = frames.tb_next
    return hook


def _brief(error: BaseException) -> str:
    lines: Sequence[str] = str(error).strip().splitlines() or [""]
    text = lines[0][:_SHOWN_CHARS]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


# The others usually come within this time; then their progress is read.
_SECONDS_TO_ASK = 0.1
# Outside of a run nobody records progress: the others have this time to come.
_SECONDS_OUTSIDE_OF_RUNS = 4.0
_SECONDS_UNTIL_TOLD = 10.0


class Rendezvous:
    """Progress of this rank in a run, and of the others.

    ``timeout`` is for ranks that do not come; none is waited for after one of the ``failures``.
    """

    def __init__(self, trainer: Any, mesh: Mesh, store: dist.Store, timeout: timedelta, failures: RankFailures) -> None:
        self._trainer, self._mesh, self._store, self._timeout = trainer, mesh, store, timeout
        self._is_over = failures.any_reported
        self._passed = self._trained = self._recorded = 0
        self._met, self._checksums = Counter[str](), Counter[str]()  # calls so far, by their ranks

    def passes(self) -> None:
        """Record that this rank goes on to a collective; a message that no rank waits for."""
        self._passed += 1
        self._trained += self._trainer.training  # replicas have different numbers of batches in validation
        with contextlib.suppress(RuntimeError):  # the store is gone with the rank that hosts it
            self._store.set(f"at-{self._mesh.rank}", f"{self._passed} {self._trained}")

    def has_recorded(self) -> None:
        """Record that this rank could record a step; a message that no rank waits for."""
        self._set_recorded(is_done=True)

    def fails_alone(self) -> bool:
        """Wait until all ranks of this replica have tried to record a step, which has failed on this one.

        Returns whether it has not failed on all of them, so that this rank cannot go on with the others.
        """
        self._set_recorded(is_done=False)
        layout, here = self._mesh.layout, self._mesh.rank
        replica = [rank for rank in range(layout.world_size) if layout.data_rank(rank) == layout.data_rank(here)]

        def have_all_failed() -> bool:
            return all(self._outcome(rank) == (self._recorded, 0) for rank in replica)

        def has_one_recorded() -> bool:
            return self._is_over() or any(self._outcome(rank) >= (self._recorded, 1) for rank in replica)

        with contextlib.suppress(RuntimeError):  # the store is gone with the rank that hosts it
            return not wait_until(have_all_failed, self._timeout.total_seconds(), has_one_recorded)
        return True

    def _set_recorded(self, *, is_done: bool) -> None:
        self._recorded += 1
        with contextlib.suppress(RuntimeError):
            self._store.set(f"recorded-{self._mesh.rank}", f"{self._recorded} {int(is_done)}")

    def _outcome(self, rank: int) -> tuple[int, ...]:
        """The number of the latest recording that a rank has tried, and whether it was done."""
        name = f"recorded-{rank}"
        return tuple(map(int, self._store.get(name).split())) if self._store.check([name]) else (0, 0)

    @property
    def reached(self) -> tuple[int, int]:
        """The collectives that this rank has gone on to, of all runs and of training."""
        return self._passed, self._trained

    def catch_up(self, passed: int, trained: int) -> None:
        """Record the progress that is furthest on any rank: some were stopped earlier than others."""
        self._passed, self._trained = passed, trained

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
        with contextlib.suppress(dist.DistNetworkError):  # the store is gone with the rank that hosts it
            self._store.set(f"waits-{self._mesh.rank}", f"{key} {self._met[key]} {what}")
            self._store.add(call, checksum)
            self._checksums[call] += checksum
            absent = self._wait(what, ranks, key, asks=asks)
            if absent is None:
                return
            if absent:
                self._store.add(f"arrived-{key}", -1)
                self._met[key] -= 1
            elif self._store.add(call, 0) != len(ranks) * self._checksums[call]:
                absent = {rank: f"make another call, {self._call_of(rank)[2]}" for rank in ranks}
                absent.pop(self._mesh.rank)
            if absent:
                self._store.add(call, -checksum)
                self._checksums[call] -= checksum
                others = {reason: [rank for rank in absent if absent[rank] == reason] for reason in absent.values()}
                raise NotOnAllRanks(
                    f"{what} on rank {self._mesh.rank} needs all {len(ranks)} ranks, since each has only its own shard"
                    f" or batches, but {'; '.join(f'ranks {found} {reason}' for reason, found in others.items())}; call"
                    " it on all ranks: only the first writes the file",
                    entry="save-ranks",
                )

    def _wait(self, what: str, ranks: Sequence[int], key: str, *, asks: bool) -> dict[int, str] | None:
        """Wait until all ranks have arrived; returns the ranks that do not come, with reasons; None after a failure."""
        wanted, start, is_told = self._met[key] * len(ranks), time.monotonic(), False
        timeout = self._timeout.total_seconds()
        if self._trainer.state.status != TrainerStatus.RUNNING:
            timeout = min(timeout, _SECONDS_OUTSIDE_OF_RUNS)
        absent: dict[int, str] = {}
        arrived = self._store.add(f"arrived-{key}", 1)

        def is_decided() -> bool:
            nonlocal absent, arrived, is_told
            if arrived >= wanted or self._is_over():
                return True
            waited = time.monotonic() - start
            missing = self._missing(ranks, key, asks=asks) if waited > _SECONDS_TO_ASK else {}
            if waited > timeout:
                missing = {rank: why or f"have not come within {waited:.0f} s" for rank, why in missing.items()}
            arrived = self._store.add(f"arrived-{key}", 0)  # after the progress, which is later
            if arrived < wanted:
                absent = {rank: why for rank, why in missing.items() if why}
            if waited > _SECONDS_UNTIL_TOLD and not is_told:
                is_told = True
                told = f"rank {self._mesh.rank} has waited {waited:.0f} s for ranks {list(missing)} in {what}"
                print(told, file=sys.stderr, flush=True)
            return bool(absent) or arrived >= wanted

        wait_until(is_decided, math.inf)
        return {} if arrived >= wanted else absent or None

    def _missing(self, ranks: Sequence[int], key: str, *, asks: bool) -> dict[int, str]:
        """What ranks do that have not come; "" while they may still come."""
        missing = {}
        for rank in ranks:
            its_key, number, what = self._call_of(rank)
            if its_key == key and number >= self._met[key]:
                continue
            needs_this = f",{self._mesh.rank}," in its_key
            if needs_this and number > self._met[its_key]:
                missing[rank] = f"wait for this one in {what}"
            else:
                missing[rank] = "have continued without it" if asks and self._is_ahead(rank) else ""
        return missing

    def _call_of(self, rank: int) -> tuple[str, int, str]:
        """The latest call for which a rank has waited: its ranks, how many they have made so far, and its name."""
        name = f"waits-{rank}"
        if not self._store.check([name]):
            return "", 0, ""
        key, number, what = self._store.get(name).decode(errors="replace").split(" ", 2)
        return key, int(number), what

    def _is_ahead(self, rank: int) -> bool:
        """Whether another rank has passed this moment."""
        layout, here = self._mesh.layout, self._mesh.rank
        at = self._store.get(f"at-{rank}").split() if self._store.check([f"at-{rank}"]) else (0, 0)
        passed, trained = map(int, at)
        same_replica = layout.data_rank(rank) == layout.data_rank(here)
        return passed > self._passed if same_replica else trained > self._trained


def _key(ranks: Sequence[int], *, compares: bool) -> str:
    """Name of the calls of these ranks; calls that compare more afterwards are counted by themselves."""
    return f"{'call' if compares else 'read'},{','.join(map(str, ranks))},"
