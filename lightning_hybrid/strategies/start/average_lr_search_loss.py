"""Learning-rate searches of callbacks decide by the mean loss over replicas."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning.pytorch.tuner.lr_finder import _LRCallback

from lightning_hybrid.mesh import Mesh
from lightning_hybrid.patching import around
from lightning_hybrid.step.tracing.recording_dataclasses import find_loss


def average_lr_search_loss(trainer: Any, mesh: Mesh) -> Callable[[], None]:
    """Let a search for the learning rate see the mean loss over the replicas, as one process does; return the undo."""
    undo = contextlib.ExitStack()
    for callback in trainer.callbacks:
        if isinstance(callback, _LRCallback) and mesh.size("data") > 1:
            search = partial(_with_mean_loss, mesh)
            undo.callback(around(callback, "on_train_batch_end", search, reason="the mean loss over replicas"))
    return undo.close


def _with_mean_loss(
    mesh: Mesh, original: Callable[..., None], trainer: Any, pl_module: Any, outputs: Any, *args: Any
) -> None:
    loss = find_loss(outputs)
    # A replica may have skipped its step.
    local = [0.0, 0.0] if loss is None else [float(loss), 1.0]
    totals = mesh.all_reduce(torch.tensor(local, dtype=torch.float64, device=trainer.strategy.root_device), "data")
    total, count = totals.tolist()
    outputs = {"loss": torch.tensor(total / count, dtype=torch.float64)} if count else outputs
    original(trainer, pl_module, outputs, *args)
