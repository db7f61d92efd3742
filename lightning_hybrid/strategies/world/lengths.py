"""Lengths of loaders: ranks must read as many batches, or one waits for another that has no more.

In training that is all ranks, which join their gradients; in an evaluation the ranks of one replica.
"""

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
_REPLICAS = (
    "replicas join their gradients, and must read as many batches: leave the division to the Trainer, divide by a"
    " DistributedSampler (drop_last=True)"
)
_SHOWN = 8  # replicas in an error


class EqualLengths(RunCallback):
    """Compares the lengths of the loaders before they are read; a stream, which may have none, is compared at its end.

    ``progress`` of the run tells whether another rank goes on to a further batch.
    """

    def __init__(self, mesh: Mesh, progress: Any) -> None:
        """Set up for the ranks of one run."""
        self._mesh, self._progress, self._rank = mesh, progress, mesh.rank

    def _compare(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compare the lengths of the loaders of the loop that begins.

        Raises:
            RanksDisagree: They differ; on every rank that must read as many batches.
        """
        group = self._mesh.group("world" if trainer.training else "replica")
        if group.size() == 1:
            return
        loop: Any = trainer._active_loop
        lengths = gather_on_all(loop.max_batches, group)
        if any(length != lengths[0] for length in lengths):
            what = trainer.state.stage.dataloader_prefix if trainer.state.stage else "train"
            raise self._differ(what, dict(zip(dist.get_process_group_ranks(group), lengths, strict=True)))

    on_train_epoch_start = on_validation_start = on_test_start = on_predict_start = _compare

    def _differ(self, what: object, lengths: dict[int, Any]) -> RanksDisagree:
        """The error for these lengths of ranks."""
        by_replica: dict[int, dict[int, Any]] = {}
        for rank, length in lengths.items():
            by_replica.setdefault(self._mesh.layout.data_rank(rank), {})[rank] = length
        uneven = (each for each in by_replica.values() if len(set(map(str, each.values()))) > 1)
        if (ranks := next(uneven, None)) is not None:
            found = ", ".join(f"{length} on rank {rank}" for rank, length in ranks.items())
            whose, advice = f"the ranks of one replica: {found}", _ADVICE
        else:
            counts = {replica: next(iter(ranks.values())) for replica, ranks in by_replica.items()}
            shown = [f"{count} on replica {replica}" for replica, count in counts.items()]
            more = f", and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
            whose = f"the replicas: {', '.join(shown[:_SHOWN])}{more}"
            advice = f"{_REPLICAS}, or set limit_train_batches={min(counts.values())}"
        return RanksDisagree(
            f"the {what} loader has different numbers of batches on {whose}; {advice}", entry="loader-lengths"
        )

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        """Wait for the other ranks at the end of a stream.

        Raises:
            RanksDisagree: One of them goes on to a further batch.
        """
        is_end = 0 <= trainer.max_steps <= trainer.global_step
        if self._mesh.size("world") == 1 or is_end or not (trainer.is_last_batch and has_stream(trainer)):
            return
        try:
            self._progress.meet("the end of the training loader")
        except NotOnAllRanks:
            read = trainer.fit_loop.epoch_loop.batch_progress.current.ready
            several = self._mesh.size("data") > 1
            replica = f" (replica {self._mesh.layout.data_rank(self._rank)})" if several else ""
            advice = f"{_REPLICAS}, or set limit_train_batches={read}" if several else _ADVICE
            raise RanksDisagree(
                f"the training loader ends after {read} batches on rank {self._rank}{replica}, and another rank goes on"
                f" to batch {read + 1}; {advice}",
                entry="loader-lengths",
            ) from None


def has_stream(trainer: pl.Trainer) -> bool:
    """Whether training data come from anything else than a DataLoader of a dataset with a length."""
    combined = trainer.fit_loop._combined_loader
    loaders = combined.flattened if isinstance(combined, CombinedLoader) else []
    return any(not isinstance(one, DataLoader) or isinstance(one.dataset, IterableDataset) for one in loaders)
