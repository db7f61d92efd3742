"""One batch of the run's own loader, before the run starts and without a trace."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any, Literal

import torch
from lightning.pytorch.trainer.connectors.data_connector import _request_dataloader
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset

from lightning_hybrid.step.randomness import GeneratorStates

_NOTHING = object()


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
        with trainer.strategy.user_world():
            batches = [_first(loader) for loader in combined.flattened]
        needed = batches[:1] if combined._mode == "sequential" else batches
        if any(batch is _NOTHING for batch in needed):
            raise ValueError(
                "a loader gave no batch to this rank, and stages are cut by recording a step on a batch; give every"
                " rank data, or the strategy example_batch=..."
            )
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
        states = _states_of([loader])
        try:
            return next(iter(loader), _NOTHING)
        finally:
            _restore(states)
    owners: list[Any] = [loader, loader.sampler, getattr(loader.batch_sampler, "sampler", None)]
    drawing = [getattr(owner, "generator", None) for owner in owners]
    generators = {id(generator): generator for generator in drawing if isinstance(generator, torch.Generator)}
    drawn = [(generator, generator.get_state()) for generator in generators.values()]
    # Not the loader: one that has a state begins to read when it is asked for it.
    states = _states_of([*owners[1:], loader.batch_sampler, loader.dataset])
    try:
        samples = _samples(loader)
        return _NOTHING if samples is _NOTHING else loader.collate_fn(samples)
    finally:
        for generator, state in drawn:
            generator.set_state(state)
        _restore(states)


def _states_of(owners: list[Any]) -> list[tuple[Any, Any]]:
    """Where those that know their place are (a stateful loader, sampler or dataset)."""
    known = {id(owner): owner for owner in owners if _is_stateful(owner)}
    return [(owner, copy.deepcopy(owner.state_dict())) for owner in known.values()]


def _is_stateful(owner: Any) -> bool:
    return callable(getattr(owner, "state_dict", None)) and callable(getattr(owner, "load_state_dict", None))


def _restore(states: list[tuple[Any, Any]]) -> None:
    for owner, state in states:
        owner.load_state_dict(state)


def _samples(loader: DataLoader[Any]) -> Any:
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset):
        samples: Iterator[Any] = iter(dataset)
        if loader.batch_size is None:
            return next(samples, _NOTHING)
        return list(itertools.islice(samples, loader.batch_size)) or _NOTHING
    indices: Any = next(iter(loader.sampler if loader.batch_sampler is None else loader.batch_sampler), _NOTHING)
    if loader.batch_sampler is None or indices is _NOTHING:
        return _NOTHING if indices is _NOTHING else dataset[indices]
    if hasattr(dataset, "__getitems__"):
        return dataset.__getitems__(indices)
    return [dataset[index] for index in indices]
