"""Data loading for all replicas of a layout in one process, with Lightning's distributed samplers."""

from __future__ import annotations

import importlib
import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_hybrid.randomness.generators import GeneratorStates
from lightning_hybrid.step.batch.split import join_batches


class ReplicaLoader:
    """Yields the batches of replica 0, or those of all joined, and queues all in ``pending`` for the step.

    So the user's hooks receive an ordinary batch. Each replica's loader has its own generator states, which start
    equal, as in separate processes.
    """

    def __init__(self, loaders: list[Iterable[Any]], *, join: bool) -> None:
        self.loaders, self._join = loaders, join
        self.pending: deque[list[Any]] = deque()
        self.sampler = _AllSamplers(loaders)

    @property
    def dataset(self) -> Any:
        """The user's dataset, whose length hooks may read; all replicas have the same."""
        return self.loaders[0].dataset  # type: ignore[attr-defined]

    def __len__(self) -> int:
        """Number of batches of replica 0, which has the most."""
        return len(self.loaders[0])  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        """Draw one batch from each loader; None for a replica that has no batch left."""
        self.pending.clear()
        device = torch.device("cpu")
        start = GeneratorStates(device)
        iterators, states = [], []
        for loader in self.loaders:
            start.restore()
            iterators.append(iter(loader))
            states.append(GeneratorStates(device))
        states[0].restore()
        for first in iterators[0]:
            batches = [first]
            current_state = GeneratorStates(device)
            for index, iterator in itertools.islice(enumerate(iterators), 1, None):
                states[index].restore()
                batches.append(next(iterator, None))
                states[index] = GeneratorStates(device)
            current_state.restore()
            self.pending.append(batches)
            yield join_batches([batch for batch in batches if batch is not None]) if self._join else first


class _AllSamplers:
    """Passes the epoch on to the samplers of all replicas."""

    def __init__(self, loaders: list[Any]) -> None:
        self._loaders = loaders

    def set_epoch(self, epoch: int) -> None:
        for loader in self._loaders:
            inner = getattr(loader, "batch_sampler", None)
            samplers: list[Any] = [getattr(loader, "sampler", None), getattr(inner, "sampler", None)]
            for sampler in samplers:
                if hasattr(sampler, "set_epoch"):
                    sampler.set_epoch(epoch)


def split_loader(
    trainer: Any, loader: Any, replicas: int, *, shuffle: bool, mode: Any, join: bool = False
) -> ReplicaLoader:
    """Split a loader over replicas as ``replicas`` processes would.

    In training Lightning's samplers pad with repeated samples, so that all replicas have as many; in evaluation each
    sample must count once, so here nothing is repeated.

    Args:
        trainer: The Trainer of this one process.
        loader: The user's loader.
        replicas: Number of replicas.
        shuffle: Whether Lightning requests shuffling.
        mode: Lightning's running stage.
        join: Whether the loader yields the batches of all replicas, joined to one.
    """
    connector = importlib.import_module(type(trainer._data_connector).__module__)
    is_split = (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and not isinstance(loader.sampler, DistributedSampler)
        and trainer._accelerator_connector.use_distributed_sampler
    )
    if not is_split:
        return ReplicaLoader([loader] * replicas, join=join)
    loaders: list[Any] = []
    for rank in range(replicas):
        sampler = connector._get_distributed_sampler(
            loader, shuffle, overfit_batches=trainer.overfit_batches, mode=mode, num_replicas=replicas, rank=rank
        )
        if mode != type(mode).TRAINING:
            sampler.total_size = len(sampler.dataset)
            sampler.num_samples = len(range(rank, sampler.total_size, replicas))
        loaders.append(connector._update_dataloader(loader, sampler, mode=mode))
    return ReplicaLoader(loaders, join=join)
