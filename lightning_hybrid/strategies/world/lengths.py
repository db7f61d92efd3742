"""Lengths of loaders: ranks of one replica must read as many batches, or one waits for another that has no more."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset

from lightning_hybrid.collectives.objects import gather_on_all
from lightning_hybrid.errors import NotOnAllRanks, RanksDisagree
from lightning_hybrid.mesh import Mesh
from lightning_hybrid.strategies.world.callbacks import RunCallback

_ADVICE = (
    "ranks of one replica must read the same batches: build the same loader on each, without LOCAL_RANK or a rank of"
    " torch.distributed"
)


class EqualLengths(RunCallback):
    """Compares the lengths of the loaders before they are read; a stream, which may have none, is compared at its end.

    ``progress`` of the run tells whether another rank goes on to a further batch.
    """

    def __init__(self, mesh: Mesh, progress: Any) -> None:
        """Set up for the ranks of one replica."""
        self._group, self._progress, self._rank = mesh.group("replica"), progress, mesh.rank

    def _compare(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compare the lengths of the loaders of the loop that begins.

        Raises:
            RanksDisagree: They differ; on every rank of the replica.
        """
        if self._group.size() == 1:
            return
        loop: Any = trainer._active_loop
        lengths = gather_on_all(loop.max_batches, self._group)
        if any(length != lengths[0] for length in lengths):
            ranks = dist.get_process_group_ranks(self._group)
            found = ", ".join(f"{length} on rank {rank}" for rank, length in zip(ranks, lengths, strict=True))
            what = trainer.state.stage.dataloader_prefix if trainer.state.stage else "train"
            raise RanksDisagree(
                f"the {what} loader has different numbers of batches on the ranks of one replica: {found}; {_ADVICE}",
                entry="loader-lengths",
            )

    on_train_epoch_start = on_validation_start = on_test_start = on_predict_start = _compare

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        """Wait for the other ranks at the end of a stream.

        Raises:
            RanksDisagree: One of them goes on to a further batch.
        """
        if self._group.size() == 1 or not (trainer.is_last_batch and has_stream(trainer)):
            return
        ranks = dist.get_process_group_ranks(self._group)
        try:
            self._progress.meet("the end of the training loader", ranks)
        except NotOnAllRanks:
            read = trainer.fit_loop.epoch_loop.batch_progress.current.ready
            raise RanksDisagree(
                f"the training loader ends after {read} batches on rank {self._rank}, and another of ranks {ranks},"
                f" which hold one replica, goes on to batch {read + 1}; {_ADVICE}",
                entry="loader-lengths",
            ) from None


def has_stream(trainer: pl.Trainer) -> bool:
    """Whether training data come from anything else than a DataLoader of a dataset with a length."""
    combined = trainer.fit_loop._combined_loader
    loaders = combined.flattened if isinstance(combined, CombinedLoader) else []
    return any(not isinstance(one, DataLoader) or isinstance(one.dataset, IterableDataset) for one in loaders)
