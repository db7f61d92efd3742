"""A graceful stop of all ranks at the same place: after a signal, or ``trainer.should_stop`` on any rank.

One rank alone may be told: by its own clock, or by a condition on its rank. A place is the end of a training batch or
the start of an epoch; all ranks come by the same places, but not at the same time, and must not wait for each other
there. So each counts its places in the store, in one operation that also tells whether another rank has knocked, which
adds to the counts of all. Whoever finds the flag set at a place knocks, and sees how far each rank was at that moment:

    another has passed the place    it did so without the flag: all stop at the next place that none has passed
    none has                        each finds the knock at that place, and votes: all have the flag, and stop there
                                    together, as one process does; or some have not, and all stop at the next place
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_prefixed_message, rank_zero_info

from lightning_hybrid.mesh import Mesh
from lightning_hybrid.patching import around, replace
from lightning_hybrid.strategies.world.rendezvous import pauses

_KNOCK = 1 << 32  # above any number of places

log = logging.getLogger(pl.__name__)


def _nothing() -> None:
    pass


class Stopping:
    """What this rank knows of who wants to stop, and where all will."""

    def __init__(
        self,
        trainer: Any,
        mesh: Mesh,
        store: dist.Store,
        prefix: str,
        timeout: timedelta,
        is_over: Callable[[], bool],
    ) -> None:
        """Begin to listen.

        Args:
            trainer: About to run.
            mesh: The ranks.
            store: By which they met; it works where collectives do not.
            prefix: Of this run's keys in the store.
            timeout: For ranks that do not come to a place.
            is_over: Whether a rank has failed; then nobody is waited for.
        """
        self._trainer = trainer
        self._mesh = mesh
        self._store = store
        self._prefix = prefix
        self._timeout = timeout
        self._is_over = is_over
        self._batches = self._places = self._knocks = 0
        self._is_signalled = False
        self._signal_due: int | None = None
        self._signalled_rank = -1
        self._round = 0
        self._is_agreed = self._wants = False
        self._asker = -1
        self._vote_at = 0
        self._due: int | None = None
        self._undo = contextlib.ExitStack()
        # Lightning's own handler waits in a collective that the other ranks may never join.
        self._replace(trainer._signal_connector, "_sigterm_notifier_fn", self._on_sigterm)
        # It also asks rank 0 before every batch, and so makes all ranks wait for each other.
        self._replace(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", self._stop_if_told)
        if mesh.layout.world_size > 1:
            # The user's hooks may set the flag until these have run; then Lightning reads it.
            self._extend(trainer.fit_loop, "run", before=self._agree_at_once)
            self._extend(trainer.fit_loop, "on_run_start", after=self._agree_at_once)
            self._extend(trainer.fit_loop, "on_advance_start", after=self._pass_place)
            self._extend(trainer.fit_loop.epoch_loop, "on_advance_end", before=self._pass_place)
            self._extend(trainer.fit_loop.epoch_loop.val_loop, "run", after=self._agree_at_once)
            self._extend(trainer.fit_loop, "on_advance_end", after=self._agree_at_once)

    def stop_listening(self) -> None:
        """Undo what was done to the trainer."""
        self._undo.close()

    def _replace(self, changed: Any, name: str, method: Callable[..., Any]) -> None:
        self._undo.callback(replace(changed, name, method, reason="all ranks stop after one batch"))

    def _extend(
        self, loop: Any, name: str, *, before: Callable[[], None] = _nothing, after: Callable[[], None] = _nothing
    ) -> None:
        def extended(original: Callable[..., Any], *args: Any) -> Any:
            before()
            result = original(*args)
            after()
            return result

        self._undo.callback(around(loop, name, extended, reason="all ranks stop after one batch"))

    # -- told by a signal ---------------------------------------------------------------------------------------------

    def _on_sigterm(self, signum: int, frame: Any) -> None:
        """Agree on the batch after which all ranks stop; a signal that comes again changes nothing."""
        log.info(rank_prefixed_message(f"Received SIGTERM: {signum}", self._mesh.rank))
        if self._is_signalled:
            return
        self._is_signalled = True
        if self._trainer.strategy.launcher is not None:
            self._trainer.strategy.launcher.kill(signum)
        if self._mesh.layout.world_size == 1:
            self._trainer._signal_connector.received_sigterm = True
            return
        # Others may be one batch further, or, where gradients are accumulated, as many as they share nothing in.
        due = f"{self._batches + 1 + self._trainer.accumulate_grad_batches} {self._mesh.rank}"
        with contextlib.suppress(RuntimeError):
            if self._store.compare_set(self._signal_key, "", due).decode() == due:
                self._knock()

    @property
    def _signal_key(self) -> str:
        return self._prefix + "sigterm"

    def _stop_if_told(self) -> None:
        if self._trainer.received_sigterm:
            raise SIGTERMException

    def on_batch_start(self) -> None:
        """A batch of any kind begins on this rank."""
        self._batches += 1
        if self._mesh.layout.world_size > 1 and not self._trainer.training:
            with contextlib.suppress(RuntimeError):  # the store is gone with the rank that hosts it
                self._hear_of_signal()

    def _hear_of_signal(self) -> None:
        connector = self._trainer._signal_connector
        if self._signal_due is None and self._store.check([self._signal_key]):
            self._signal_due, self._signalled_rank = map(int, self._store.get(self._signal_key).split())
        if self._signal_due is not None and self._batches >= self._signal_due and not connector.received_sigterm:
            connector.received_sigterm = True  # Lightning looks at this at the end of each batch
            rank_zero_info(f"rank {self._signalled_rank} has received SIGTERM: all ranks stop, {self._where()}")

    # -- told by trainer.should_stop ----------------------------------------------------------------------------------

    def _agree_at_once(self) -> None:
        """All ranks are here, and stop if any wants to."""
        wants = bool(self._trainer.should_stop) or self._wants
        stops = self._trainer.strategy.reduce_boolean_decision(wants, all=False)
        if stops:
            self._trainer.should_stop = True
        if self._is_agreed and not stops:  # it was taken back
            self._round += 1
            self._asker, self._due = -1, None
        self._wants, self._is_agreed = False, stops

    def _key(self, name: str) -> str:
        return f"{self._prefix}stop-{self._round}-{name}"

    def _count_key(self, rank: int) -> str:
        return f"{self._prefix}places-{rank}"

    def _knock(self) -> list[int]:
        """Make each rank look at what is asked, at its next place at the latest; how many each has passed."""
        ranks = range(self._mesh.layout.world_size)
        return [self._store.add(self._count_key(rank), _KNOCK) % _KNOCK for rank in ranks]

    def _pass_place(self) -> None:
        """Find whether all ranks stop here."""
        here = self._places = self._places + 1
        with contextlib.suppress(RuntimeError):  # the store is gone with the rank that hosts it
            if self._trainer.should_stop and not self._is_agreed:
                self._wants = True
                if self._asker < 0:
                    self._ask(here)  # before this place is counted: who asks must not take this rank for one without
            knocks = self._store.add(self._count_key(self._mesh.rank), 1) // _KNOCK
            if knocks != self._knocks:
                self._knocks = knocks
                if self._asker < 0 and self._store.check([self._key("asked")]):
                    self._learn()
            if knocks:
                self._hear_of_signal()
            if self._asker >= 0 and not self._is_agreed:
                self._decide(here)

    def _ask(self, here: int) -> None:
        """Ask the others for a place where all stop, unless another rank does."""
        mine = f"{self._mesh.rank} {here}"
        if self._store.compare_set(self._key("asked"), "", mine).decode() == mine:
            furthest = max(self._knock())
            if furthest >= here:
                self._store.set(self._key("due"), str(furthest + 1))
            self._store.set(self._key("open"), "")
        self._learn()

    def _learn(self) -> None:
        """Learn what was asked, and wait the moment until the rank that asks has seen where the others are."""
        asker, place = map(int, self._store.get(self._key("asked")).split())
        if self._wait_for("open"):
            self._asker, self._vote_at = asker, place

    def _decide(self, here: int) -> None:
        """Stop here, or have the flag wait for the place where all do."""
        if self._due is None and self._store.check([self._key("due")]):
            self._due = int(self._store.get(self._key("due")))
        if self._due is None and here == self._vote_at:
            self._due = self._vote(here)
        if self._due is not None and here >= self._due:
            self._trainer.should_stop, self._wants, self._is_agreed = True, False, True
            if here > self._vote_at:
                rank_zero_info(
                    f"trainer.should_stop was set on rank {self._asker}, and not on all ranks after the same batch:"
                    f" all take it as set now, {self._where()}"
                )
        else:
            self._trainer.should_stop = False

    def _vote(self, here: int) -> int:
        """Where all ranks stop; those that want to stop here wait until the others have come."""
        if not self._wants:
            return int(self._store.compare_set(self._key("due"), "", str(here + 1)))
        if self._store.add(self._key("yes"), 1) == self._mesh.layout.world_size:
            self._store.set(self._key("due"), str(here))
        return int(self._store.get(self._key("due"))) if self._wait_for("due") else here

    def _wait_for(self, name: str) -> bool:
        """Wait until another rank has said this; whether it did."""
        end, pause = time.monotonic() + self._timeout.total_seconds(), pauses()
        while not self._store.check([self._key(name)]):
            if time.monotonic() > end or self._is_over():
                return False
            next(pause)
        return True

    def _where(self) -> str:
        """Which batch this rank is at."""
        trainer = self._trainer
        if not trainer.training:
            return f"in batch {self._batches} of this run"
        return f"after batch {trainer.fit_loop.epoch_loop.batch_idx} of epoch {trainer.current_epoch}"
