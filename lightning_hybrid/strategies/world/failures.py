"""Failures of ranks: each rank learns of other ranks' failures, and of ranks that do not arrive."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_hybrid.collectives.arrivals import store_of_run, wait_until
from lightning_hybrid.errors import NotOnAllRanks, RanksDisagree, add_error_note, error_notes_of
from lightning_hybrid.mesh import Mesh, is_lost_connection
from lightning_hybrid.shared_memory.sockets import close_peer_sockets
from lightning_hybrid.strategies.world.callbacks import RunCallback
from lightning_hybrid.strategies.world.rendezvous import Rendezvous
from lightning_hybrid.strategies.world.stop import GracefulStop, SlurmRequeue
from lightning_hybrid.strategies.world.traces import shorten
from lightning_hybrid.text import WIDTH, wrapped

# Time for the others to fail by themselves, as they do where all ranks make the same mistake.
_SECONDS_FOR_PEERS = 1.0
# Time that the rank which may host the store stays, for the others to read why it failed.
_SECONDS_FOR_READERS = 2.0
# Time for the rank that failed first to print its error, before others refer to it.
_SECONDS_FOR_FIRST = 1.0
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

    def report(self, error: BaseException) -> None:
        """Let the error be printed as with several ranks."""
        shorten(error)

    def passes(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    has_recorded = meet = catch_up = passes

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
            shorten(error, _printed(here, reason))
            self._close(reason)
            return
        is_same = first != cause and _is_reported_by(first, error)
        failed = " ".join(first.split()[:2])  # "rank 0"
        line = f"rank {self._mesh.rank} stopped: {failed} failed (see there)" if is_same else ""
        shorten(error, line, seconds=_SECONDS_FOR_FIRST)
        if self._all_reported(_SECONDS_FOR_PEERS):
            return
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
        rank = f"rank {self._mesh.rank}"
        if size > 1:
            rank += f" (pipeline rank {self._mesh.rank_in('pp')} of {size})"
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


def _is_reported_by(first: str, error: BaseException) -> bool:
    """Whether the first failure is the same as an error, or tells of the same disagreement from the other side."""
    disagree = NotOnAllRanks, RanksDisagree
    if isinstance(error, disagree) and any(f" failed: {kind.__name__}: " in first for kind in disagree):
        return True
    return first.endswith(f" failed: {_brief(error)}")


def _brief(error: BaseException) -> str:
    lines: Sequence[str] = str(error).strip().splitlines() or [""]
    text = lines[0][:_SHOWN_CHARS]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _printed(here: str, cause: str) -> str:
    """The line of a rank that stops because of a cause: within 100 characters, or without the message of the error."""
    where, failed, error = cause.partition(" failed: ")
    if not failed:
        return wrapped(f"{here} had to stop: {cause}")
    rank, first = (" ".join(place.split()[:2]) for place in (here, where))  # "rank 0", and not its place
    line = f"{rank} stopped: {first} failed: {error}"
    return line if len(line) <= WIDTH else f"{rank} stopped: {first} failed: {error.partition(':')[0]} (see there)"
