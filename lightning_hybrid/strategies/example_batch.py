"""One batch of the run's own loader, before the run starts and without a trace."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Literal

import torch
from lightning.pytorch.trainer.connectors.data_connector import _request_dataloader
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset

from lightning_hybrid.step.randomness import GeneratorStates


def take_example(trainer: Any, loop: Any, mode: Literal["max_size_cycle", "sequential"]) -> Any:
    """The first batch of a loop's loaders, on the strategy's device, after the user's transfer hooks.

    The loader hook is called now instead of when the loop starts; the loop is handed the same loaders. The batch comes
    from an iterator of its own, without workers, and all generators are put back.

    Args:
        trainer: The Lightning trainer.
        loop: Its fit, evaluation or prediction loop.
        mode: How the loop combines several loaders.
    """
    source = loop._data_source
    loaders = _request_dataloader(source)
    request = source.dataloader

    def dataloader_once() -> Any:
        source.dataloader = request
        return loaders

    source.dataloader = dataloader_once
    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, mode)
    states = GeneratorStates(trainer.strategy.root_device)
    try:
        for loader in combined.flattened:
            trainer.strategy.deal_to_replicas(loader)
        batches = [_first(loader) for loader in combined.flattened]
        if combined._mode == "sequential":
            batch = batches[0]
        else:
            batch = torch.utils._pytree.tree_unflatten(batches, combined._spec)
        module = trainer.lightning_module
        batch = trainer.precision_plugin.convert_input(batch)
        batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
        return trainer.strategy.batch_to_device(batch, dataloader_idx=0)
    finally:
        states.restore()


def _first(loader: Any) -> Any:
    if not isinstance(loader, DataLoader):
        return next(iter(loader))
    owners: list[Any] = [loader, loader.sampler, getattr(loader.batch_sampler, "sampler", None)]
    drawing = [getattr(owner, "generator", None) for owner in owners]
    generators = {id(generator): generator for generator in drawing if isinstance(generator, torch.Generator)}
    states = [(generator, generator.get_state()) for generator in generators.values()]
    try:
        return loader.collate_fn(_samples(loader))
    finally:
        for generator, state in states:
            generator.set_state(state)


def _samples(loader: DataLoader[Any]) -> Any:
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset):
        samples: Iterator[Any] = iter(dataset)
        if loader.batch_size is None:
            return next(samples)
        return list(itertools.islice(samples, loader.batch_size))
    if loader.batch_sampler is None:
        return dataset[next(iter(loader.sampler))]
    indices = next(iter(loader.batch_sampler))
    if hasattr(dataset, "__getitems__"):
        return dataset.__getitems__(indices)
    return [dataset[index] for index in indices]
