"""``Trainer(sync_batchnorm=True)``: BatchNorm over the replicas."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm

from lightning_hybrid.mesh import Mesh
from lightning_hybrid.replicate.batch_norm import SyncedBatchNorm


def synced_norms(layer_sync: Any, mesh: Mesh, verify_first_step: bool) -> SyncedBatchNorm | None:
    """Return the BatchNorm synchronization of a Trainer's ``sync_batchnorm``; None without it, or other replicas.

    Raises:
        ValueError: The user's layer sync replaces layers, or one process cannot repeat the step.
    """
    if layer_sync is None or mesh.size("data") == 1:
        return None
    if not isinstance(layer_sync, TorchSyncBatchNorm):
        raise ValueError(
            f"{type(layer_sync).__name__} replaces layers after this strategy has found them; pass"
            " sync_batchnorm=True, which takes statistics over the replicas, or build the module with such layers"
        )
    if verify_first_step:
        raise ValueError(
            "verify_first_step=True runs the batches of the replicas one after the other in one process, where"
            " sync_batchnorm=True cannot take statistics over all of them; verify without sync_batchnorm, or set"
            " verify_first_step=False"
        )
    return SyncedBatchNorm(mesh.group("data"))
