"""Samplers of the user: each replica draws its own share, and epochs are set."""

from __future__ import annotations

import math
from typing import Any

from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader, DistributedSampler


def split_sampler_over_replicas(loader: object, *, replicas: int, replica: int, world_size: int) -> None:
    """Make a user's ``DistributedSampler`` split over replicas where it splits over all ranks; in place.

    Built without arguments, or with the world's size, it would give the ranks of one replica different batches. One
    that splits over another number of readers is deliberate, and stays.

    Raises:
        ValueError: A subclass with a count of its own, which cannot be changed from here.
    """
    if replicas == world_size:
        return
    for sampler in samplers_of(loader):
        if not isinstance(sampler, DistributedSampler):
            continue
        before = sampler.num_replicas, sampler.rank
        if sampler.num_replicas not in (world_size, replicas) or before == (replicas, replica):
            continue
        wanted = f"num_replicas={replicas}, rank={replica}"
        if (sampler.num_samples, sampler.total_size) != _sizes(sampler, before[0]):
            raise ValueError(
                f"{type(sampler).__name__} splits over num_replicas={before[0]} ranks, this one as rank={before[1]},"
                f" but the {world_size} ranks are {replicas} replicas, and ranks of one replica must see the same"
                f" batch; build it with {wanted} on this rank, from trainer.distributed_sampler_kwargs or"
                " trainer.strategy.distributed_sampler_kwargs"
            )
        sampler.num_replicas, sampler.rank = replicas, replica
        sampler.num_samples, sampler.total_size = _sizes(sampler, replicas)
        rank_zero_warn(
            f"your {type(sampler).__name__} splits over num_replicas={before[0]} ranks, but the {world_size} ranks are"
            f" {replicas} replicas, and ranks of one replica must see the same batch; it now has {wanted} on this"
            " rank. Leave samplers to the Trainer, or build them from trainer.strategy.distributed_sampler_kwargs"
        )


def samplers_of(loader: object) -> list[Any]:
    """The samplers of a loader, and the samplers that they draw from."""
    if not isinstance(loader, DataLoader):
        return []
    samplers: dict[int, Any] = {}
    waiting: list[Any] = [loader.sampler, loader.batch_sampler]
    while waiting:
        sampler = waiting.pop()
        if sampler is None or id(sampler) in samplers:
            continue
        samplers[id(sampler)] = sampler
        # Batch samplers and wrappers keep the sampler that they draw from under these names.
        waiting += [getattr(sampler, name, None) for name in ("sampler", "batch_sampler")]
    return list(samplers.values())


def _sizes(sampler: DistributedSampler[Any], replicas: int) -> tuple[int, int]:
    """Numbers of samples of each replica and of all, as torch counts them."""
    samples = len(sampler.dataset)  # type: ignore[arg-type]
    if sampler.drop_last and samples % replicas:
        samples -= replicas
    each = math.ceil(samples / replicas)
    return each, each * replicas


def set_next_epoch(trainer: Any, loader: object) -> None:
    """Set the epoch that a fit begins with, or goes on with, on the samplers of its loader."""
    loop = trainer.fit_loop
    # Restored after `configure_optimizers`, which may ask for the number of batches and so for iterators.
    saved = (trainer._checkpoint_connector._loaded_checkpoint.get("loops") or {}).get("fit_loop")
    if saved:
        epochs, batches = saved["epoch_progress"], saved["epoch_loop.batch_progress"]
    else:
        epochs, batches = loop.epoch_progress.state_dict(), loop.epoch_loop.batch_progress.state_dict()
    current = epochs["current"]
    # Saved after the last batch of an epoch, which Lightning counts when the loop begins.
    is_over = current["started"] > current["processed"] and batches["is_last_batch"]
    _set_sampler_epoch(loader, current["processed"] + is_over)
