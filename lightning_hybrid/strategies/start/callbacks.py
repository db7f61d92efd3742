"""Callbacks of the user at the start: refused where ranks cannot run them, or given the mean over replicas."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning.pytorch.callbacks import BatchSizeFinder, ModelPruning
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.tuner.lr_finder import _LRCallback

from lightning_hybrid.callbacks.slow_links import SlowLinkCallback
from lightning_hybrid.mesh import Mesh
from lightning_hybrid.patching import around
from lightning_hybrid.shared_memory.transfers import transfers_of
from lightning_hybrid.step.tracing.recording import find_loss


def check_callbacks(trainer: Any, mesh: Mesh, *, is_recorded: bool) -> None:
    """Refuse callbacks that cannot agree over ranks, before anything has changed.

    ``is_recorded`` means that steps run from a recording, which names the parameters of each layer.
    """
    layout = mesh.layout
    world_size, num_stages = layout.world_size, layout.pipeline_parallel_size
    is_sharded = world_size > layout.data_replicate_size or layout.joins_replicas
    for callback in trainer.callbacks:
        is_search = isinstance(callback, BatchSizeFinder) and world_size > 1
        if is_search and trainer.state.fn != TrainerFn.FITTING:
            raise ValueError(
                f"{type(callback).__name__} in trainer.{trainer.state.fn.value} tries batches inside of an evaluation,"
                f" whose samples {world_size} ranks have divided already; search in trainer.fit, or with devices=1, and"
                " make another Trainer without the callback"
            )
        if is_search and (why := why_ranks_cannot_stop_together(trainer, mesh)):
            raise ValueError(
                f"{type(callback).__name__} tries sizes until memory runs out, and {why}; find the batch size of one"
                " replica with devices=1 and Lightning's own strategy, or set it yourself, and remove the callback"
            )
        if isinstance(callback, ModelPruning) and (is_sharded or is_recorded):
            holders = f"{num_stages} pipeline ranks" if num_stages > 1 else f"{world_size} ranks"
            why = f"each of {holders} holds its own shard" if is_sharded else "recorded steps compute with the old ones"
            raise ValueError(
                f"{type(callback).__name__} replaces parameters by masked ones and ranks them over the whole model, but"
                f" {why}; prune after fit, when the module is full, or train with replicas alone:"
                " pipeline_parallel_size=1, stages_per_rank=1, tensor_parallel_size=1, zero_stage=0, num_microbatches=1"
            )


def why_ranks_cannot_stop_together(trainer: Any, mesh: Mesh) -> str:
    """Return why the ranks of a run cannot all stop in a step in which one runs out of memory; "" if they can.

    Collective over the ranks of a pipeline.
    """
    layout = mesh.layout
    if layout.joins_replicas:
        return (
            f"ranks that share experts ({layout.option('ep')}) exchange tokens in the"
            " middle of a step, which cannot be undone if one of them runs out of memory"
        )
    for callback in trainer.callbacks:
        if isinstance(callback, SlowLinkCallback):
            name = type(callback).__name__
            return f"{name} keeps what a step that is undone has left of its messages; remove {name}"
    if layout.pipeline_parallel_size > 1 and transfers_of(mesh.group("pp")) is None:
        return (
            f"messages between the {layout.pipeline_parallel_size} pipeline ranks can be discarded in the memory of one"
            " host only, on CPUs: a rank that runs out of memory would leave others waiting for its messages"
        )
    return ""


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
