"""Refusals of callbacks of Lightning that cannot decide the same on every rank."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import BatchSizeFinder, ModelPruning

from lightning_hybrid.layout import ParallelLayout


def check_callbacks(trainer: Any, layout: ParallelLayout, *, is_recorded: bool) -> None:
    """Refuse callbacks that cannot agree over ranks, before anything has changed.

    ``is_recorded`` means that steps run from a recording, which names the parameters of each layer.

    Raises:
        ValueError: There is such a callback.
    """
    world_size, num_stages = layout.world_size, layout.pipeline_parallel_size
    is_sharded = world_size > layout.data_replicate_size or layout.expert_parallel_size > 1
    for callback in trainer.callbacks:
        if isinstance(callback, BatchSizeFinder) and world_size > 1:
            raise ValueError(
                f"{type(callback).__name__} tries sizes until memory runs out, and one of {world_size} ranks that runs"
                " out of memory in the middle of a step leaves the others waiting for it; find the batch size of one"
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
