"""Requeue of a SLURM job: all ranks save after the same batch, and the first one requeues the job.

Lightning saves where the signal finds a rank. Ranks that share a model are then at different points of a step, and a
file needs all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.plugins.environments import SLURMEnvironment

from lightning_hybrid.mesh import Mesh
from lightning_hybrid.patching import replace
from lightning_hybrid.strategies.world.callbacks_added_by_strategy import RunCallback

_HANDLER = "_slurm_sigusr_handler_fn"


class SlurmRequeue(RunCallback):
    """Runs after all other callbacks, so that their changes at the end of a batch are saved."""

    def __init__(self, trainer: Any, mesh: Mesh, store: dist.Store) -> None:
        self._trainer, self._store = trainer, store
        self._round = self._batches = self._signum = 0
        self._undo: Callable[[], None] = lambda: None
        environment = trainer._accelerator_connector.cluster_environment
        listens = isinstance(environment, SLURMEnvironment) and environment.auto_requeue
        trainer.callbacks[:] = [other for other in trainer.callbacks if not isinstance(other, SlurmRequeue)]
        if listens and mesh.layout.world_size > 1:
            self._signum = int(environment.requeue_signal or 0)
            trainer.callbacks.append(self)
            connector = trainer._signal_connector
            self._undo = replace(connector, _HANDLER, self._on_signal, reason="all ranks save after one batch")

    def stop_listening(self) -> None:
        """Undo the changes to the trainer."""
        self._trainer.callbacks[:] = [callback for callback in self._trainer.callbacks if callback is not self]
        self._undo()

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
