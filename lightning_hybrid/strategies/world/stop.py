"""Signals that end a run: a checkpoint after the batch, and Slurm's requeue."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_prefixed_message, rank_zero_info

from lightning_hybrid.collectives.arrivals import wait_until
from lightning_hybrid.mesh import Mesh
from lightning_hybrid.patching import around, replace
from lightning_hybrid.strategies.world.callbacks import RunCallback

SIGTERM = "sigterm"  # key in the store, once any rank has received one
_INTERRUPT = 1 << 32  # above any number of stop points

log = logging.getLogger(pl.__name__)


class GracefulStop:
    """Agreement of the ranks on a stop, through the store by which they met: it works where collectives do not.

    ``timeout`` is for ranks that do not come to a stop point; none is waited for after one of the ``failures``.
    """

    def __init__(self, trainer: Any, mesh: Mesh, store: dist.Store, timeout: timedelta, failures: Any) -> None:
        self._trainer, self._mesh, self._store = trainer, mesh, store
        self._timeout, self._is_over = timeout, failures.any_reported
        self._batches = self._stop_points = self._interrupts = 0
        self._is_signalled = False
        self._signal_due: int | None = None
        self._signalled_rank = -1
        self._round = 0
        self._is_agreed = self._wants_stop = False
        self._proposer = -1
        self._vote_point = 0
        self._due: int | None = None
        self._undo = contextlib.ExitStack()
        # Lightning's own handler waits in a collective that the other ranks may never join.
        self._replace(trainer._signal_connector, "_sigterm_notifier_fn", self._on_sigterm)
        # It also asks rank 0 before every batch, and so makes all ranks wait for each other.
        self._replace(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", self._raise_if_signalled)
        # The user's hooks may set the flag until these have run; then Lightning reads it.
        self._extend(trainer.fit_loop, "run", before=self._agree_here)
        self._extend(trainer.fit_loop, "on_run_start", after=self._agree_here)
        self._extend(trainer.fit_loop, "on_advance_start", after=self._pass_stop_point)
        self._extend(trainer.fit_loop.epoch_loop, "on_advance_end", before=self._pass_stop_point)
        self._extend(trainer.fit_loop.epoch_loop.val_loop, "run", after=self._agree_here)
        self._extend(trainer.fit_loop, "on_advance_end", after=self._agree_here)

    def stop_listening(self) -> None:
        """Undo what was done to the trainer."""
        self._undo.close()

    def _replace(self, changed: Any, name: str, method: Callable[..., Any]) -> None:
        self._undo.callback(replace(changed, name, method, reason="all ranks stop after one batch"))

    def _extend(
        self,
        loop: Any,
        name: str,
        *,
        before: Callable[[], None] = lambda: None,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        def extended(original: Callable[..., Any], *args: Any) -> Any:
            before()
            result = original(*args)
            after()
            return result

        self._undo.callback(around(loop, name, extended, reason="all ranks stop after one batch"))

    # -- by a signal --------------------------------------------------------------------------------------------------

    def _on_sigterm(self, signum: int, frame: Any) -> None:
        """Agree on the batch after which all ranks stop; a repeated signal changes nothing."""
        log.info(rank_prefixed_message(f"Received SIGTERM: {signum}", self._mesh.rank))
        if self._is_signalled:
            return
        self._is_signalled = True
        if self._trainer.strategy.launcher is not None:
            self._trainer.strategy.launcher.kill(signum)
        # Others may be one batch further, or, where gradients are accumulated, as many as they share nothing in.
        due = f"{self._batches + 1 + self._trainer.accumulate_grad_batches} {self._mesh.rank}"
        with contextlib.suppress(RuntimeError):
            if self._store.compare_set(SIGTERM, "", due).decode() == due:
                self._interrupt_all()

    def _raise_if_signalled(self) -> None:
        if self._trainer.received_sigterm:
            raise SIGTERMException

    def on_batch_start(self) -> None:
        """Count a batch of any kind that begins on this rank."""
        self._batches += 1
        if not self._trainer.training:
            with contextlib.suppress(RuntimeError):  # the store is gone with the rank that hosts it
                self._check_signal()

    def _check_signal(self) -> None:
        connector = self._trainer._signal_connector
        if self._signal_due is None and self._store.check([SIGTERM]):
            self._signal_due, self._signalled_rank = map(int, self._store.get(SIGTERM).split())
        if self._signal_due is not None and self._batches >= self._signal_due and not connector.received_sigterm:
            connector.received_sigterm = True  # Lightning looks at this at the end of each batch
            rank_zero_info(f"rank {self._signalled_rank} has received SIGTERM: all ranks stop, {self._where()}")

    # -- by trainer.should_stop ---------------------------------------------------------------------------------------

    def _agree_here(self) -> None:
        """Stop all ranks, which are all here, if any of them wants to."""
        wants = bool(self._trainer.should_stop) or self._wants_stop
        stops = self._trainer.strategy.reduce_boolean_decision(wants, all=False)
        if stops:
            self._trainer.should_stop = True
        if self._is_agreed and not stops:  # it was taken back
            self._round += 1
            self._proposer, self._due = -1, None
        self._wants_stop, self._is_agreed = False, stops

    def _key(self, name: str) -> str:
        return f"stop-{self._round}-{name}"

    def _count_key(self, rank: int) -> str:
        return f"stop-points-{rank}"

    def _interrupt_all(self) -> list[int]:
        """Make each rank read the proposal, at its next stop point at the latest; return how many each has passed.

        One rank asks for each other one, once per stop, so that each asks only once at a stop point.
        """
        ranks = range(self._mesh.layout.world_size)
        return [self._store.add(self._count_key(rank), _INTERRUPT) % _INTERRUPT for rank in ranks]

    def _pass_stop_point(self) -> None:
        """Find whether all ranks stop here."""
        here = self._stop_points = self._stop_points + 1
        with contextlib.suppress(RuntimeError):  # the store is gone with the rank that hosts it
            if self._trainer.should_stop and not self._is_agreed:
                self._wants_stop = True
                if self._proposer < 0:
                    # Before this point is counted: the proposer must not take this rank for one without the flag.
                    self._propose(here)
            interrupts = self._store.add(self._count_key(self._mesh.rank), 1) // _INTERRUPT
            if interrupts != self._interrupts:
                self._interrupts = interrupts
                if self._proposer < 0 and self._store.check([self._key("proposal")]):
                    self._read_proposal()
            if interrupts:
                self._check_signal()
            if self._proposer >= 0 and not self._is_agreed:
                self._decide(here)

    def _propose(self, here: int) -> None:
        """Propose a stop of all ranks, unless another rank has."""
        proposal = f"{self._mesh.rank} {here}"
        if self._store.compare_set(self._key("proposal"), "", proposal).decode() == proposal:
            furthest = max(self._interrupt_all())
            if furthest >= here:
                self._store.set(self._key("due"), str(furthest + 1))
            self._store.set(self._key("open"), "")
        self._read_proposal()

    def _read_proposal(self) -> None:
        """Read the proposal, and wait until the rank that made it has read the progress of the others."""
        proposer, point = map(int, self._store.get(self._key("proposal")).split())
        if self._wait_for("open"):
            self._proposer, self._vote_point = proposer, point

    def _decide(self, here: int) -> None:
        """Stop here, or clear the flag until the stop point where all ranks stop."""
        if self._due is None and self._store.check([self._key("due")]):
            self._due = int(self._store.get(self._key("due")))
        if self._due is None and here == self._vote_point:
            self._due = self._vote(here)
        if self._due is not None and here >= self._due:
            self._trainer.should_stop, self._wants_stop, self._is_agreed = True, False, True
            if here > self._vote_point:
                rank_zero_info(
                    f"trainer.should_stop was set on rank {self._proposer}, and not on all ranks after the same batch:"
                    f" all take it as set now, {self._where()}"
                )
        else:
            self._trainer.should_stop = False

    def _vote(self, here: int) -> int:
        """Return the stop point of all ranks; a rank that wants to stop here waits until the others have come."""
        if not self._wants_stop:
            return int(self._store.compare_set(self._key("due"), "", str(here + 1)))
        if self._store.add(self._key("yes"), 1) == self._mesh.layout.world_size:
            self._store.set(self._key("due"), str(here))
        return int(self._store.get(self._key("due"))) if self._wait_for("due") else here

    def _wait_for(self, name: str) -> bool:
        """Wait until another rank has set this key; return whether it did."""
        return wait_until(lambda: self._store.check([self._key(name)]), self._timeout.total_seconds(), self._is_over)

    def _where(self) -> str:
        """Describe the batch that this rank is at."""
        trainer = self._trainer
        if not trainer.training:
            return f"in batch {self._batches} of this run"
        return f"after batch {trainer.fit_loop.epoch_loop.batch_idx} of epoch {trainer.current_epoch}"


_HANDLER = "_slurm_sigusr_handler_fn"


class SlurmRequeue(RunCallback):
    """Runs after all other callbacks, so that their changes at the end of a batch are saved."""

    def __init__(self, trainer: Any, store: dist.Store) -> None:
        self._trainer, self._store = trainer, store
        self._round = self._batches = self._signum = 0
        self._undo = contextlib.ExitStack()
        environment = trainer._accelerator_connector.cluster_environment
        listens = isinstance(environment, SLURMEnvironment) and environment.auto_requeue
        if listens:
            self._signum = int(environment.requeue_signal or 0)
            self._undo.callback(self.enter(trainer, is_last=True))
            connector, reason = trainer._signal_connector, "all ranks save after one batch"
            self._undo.callback(replace(connector, _HANDLER, self._on_signal, reason=reason))

    def stop_listening(self) -> None:
        """Undo the changes to the trainer."""
        self._undo.close()

    @property
    def _key(self) -> str:
        return f"requeue-{self._round}"

    def _on_signal(self, signum: int, frame: Any) -> None:
        """Agree on the batch after which all ranks save; the first signal decides."""
        # Others may be one batch further, or, where gradients are accumulated, as many as they share nothing in.
        due = self._batches + 2 + self._trainer.accumulate_grad_batches
        with contextlib.suppress(RuntimeError):
            self._store.compare_set(self._key, "", str(due))

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        """Save and requeue if this is the batch."""
        self._batches += 1
        if not self._is_due():
            return
        self._round += 1
        connector = trainer._signal_connector
        getattr(type(connector), _HANDLER)(connector, self._signum, None)

    def _is_due(self) -> bool:
        with contextlib.suppress(RuntimeError):  # the store is gone with the rank that hosts it
            return self._store.check([self._key]) and self._batches >= int(self._store.get(self._key))
        return False
