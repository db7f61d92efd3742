"""What the first step shows of the user's data and module: equal batches of ranks, parameters without gradients."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_hybrid.collectives.agreement import RANKS, batches_differ, digest
from lightning_hybrid.collectives.arrivals import store_of_run
from lightning_hybrid.collectives.objects import gather_on_all
from lightning_hybrid.mesh import Mesh
from lightning_hybrid.step.objects.pytree import flatten
from lightning_hybrid.strategies.world.callbacks import RunCallback
from lightning_hybrid.strategies.world.lengths import has_stream
from lightning_hybrid.text import spanned_names


class FirstStep(RunCallback):
    """Compares the first batches of replicas once an optimizer step has joined them, and names unused parameters.

    Each replica leaves a digest in the store by which the ranks met. The first rank reads those that are there, so that
    no rank waits for a replica without a batch. Ranks of one replica compare theirs before the step, which may fail by
    what differs.
    """

    def __init__(self, mesh: Mesh) -> None:
        """Set up for the replicas of one run."""
        self._mesh, self._replicas = mesh, mesh.size("data")
        self._store = store_of_run("first-step", mesh.rank)
        self._first_step = -1  # the step that the run begins with; -1 before it
        self._is_over = False

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, *_: Any) -> None:
        """Leave the digest of this replica's first batch, the same on its ranks.

        Raises:
            RanksDisagree: It is not.
        """
        if self._first_step >= 0:
            return
        self._first_step = trainer.global_step
        leaves, group = flatten(batch)[0], self._mesh.group("replica")
        has_tensors = any(isinstance(leaf, Tensor) for leaf in leaves)
        is_stored = self._replicas > 1 and has_tensors and has_stream(trainer)
        own = digest(leaves) if is_stored or group.size() > 1 else 0
        shape = next((tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)), ())
        found = gather_on_all((own, shape), group) if group.size() > 1 else [(own, shape)]
        digests, shapes = zip(*found, strict=True)
        if len(set(digests)) > 1:
            axis = next((axis for axis in RANKS if self._mesh.size(axis) == group.size()), "replica")
            raise batches_differ(digests, RANKS.get(axis, axis), shapes)
        if is_stored:
            replica = self._mesh.layout.data_rank(self._mesh.rank)
            self._store.set(f"batch-{replica}", str(own))

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any, **__: Any) -> None:
        """Compare, after the first optimizer step."""
        if self._is_over or self._mesh.rank or trainer.global_step == self._first_step:
            return
        self._is_over = True
        if _keeps_gradients(trainer, self._mesh) and (names := _without_gradient(pl_module)):
            rank_zero_info(f"parameters without a gradient in the first step: {spanned_names(names)}")
        keys = [f"batch-{replica}" for replica in range(self._replicas)]
        found = [self._store.get(key) for key in keys if self._store.check([key])]
        if len(found) > 1 and len(set(found)) == 1:
            rank_zero_warn(
                f"{len(found)} replicas got the same first batch: the training data are a stream (IterableDataset),"
                f" which Lightning does not divide, so that every sample is trained on {len(found)} times. Let each"
                " replica yield its own part, such as itertools.islice(samples, rank, None, world_size)"
                " (lightning-hybrid explain-error equal-batches)"
            )


def _keeps_gradients(trainer: Any, mesh: Mesh) -> bool:
    """Whether a rank has the gradients of all parameters after a step."""
    options = trainer.strategy.options
    is_sharded = options.zero_stage or options.offload or options.optimizer_in_backward
    return not is_sharded and mesh.size("pp") == 1 and trainer.lightning_module.automatic_optimization


def _without_gradient(module: pl.LightningModule) -> list[str]:
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    without = [name for name, parameter in trained.items() if parameter.grad is None]
    return without if len(without) < len(trained) else []
