"""Example batch from the run's own loader, taken before the run starts and without a trace."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, Literal

import torch
from lightning.pytorch.trainer.connectors.data_connector import _request_dataloader
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_hybrid.patching import reduced_as, replace, replaced
from lightning_hybrid.randomness.generators import GeneratorStates
from lightning_hybrid.step.module_state.snapshots import ArgumentSnapshot, ModuleSnapshot
from lightning_hybrid.step.objects.pytree import children_of, flatten
from lightning_hybrid.strategies.user_code.loaders import ReadRecorder
from lightning_hybrid.strategies.world.samplers import samplers_of

_NOTHING = object()
_LONGEST = 1_000  # entries of a container in a dataset: longer ones are its samples, and not what it counts


def example_of_fit(trainer: Any, given: Any = None) -> Any:
    """Return the batch that a training step is recorded on: the one given, or the first of the fit's loaders."""
    return take_example(trainer, trainer.fit_loop, "max_size_cycle") if given is None else given


def take_example(
    trainer: Any, loop: Any, mode: Literal["max_size_cycle", "sequential"], before: list[ModuleSnapshot] | None = None
) -> Any:
    """Return the first batch of a loop's loaders, on the strategy's device, after the user's transfer hooks.

    The loader hook is called now instead of when the loop starts; the loop gets the same loaders. The batch comes from
    an iterator of its own, without workers, and all generators are restored. ``mode`` is how the loop combines several
    loaders; ``before`` gets the state of the module before the hooks.
    """
    # Set up already where `configure_optimizers` has counted batches.
    loaders = loop._combined_loader if loop is trainer.fit_loop else None
    if loaders is None:
        loaders = _request_dataloader(loop._data_source)
        provide_loaders_once(loop, lambda: loaders)
    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, mode)
    states = GeneratorStates(trainer.strategy.root_device)
    try:
        for loader in combined.flattened:
            trainer.strategy.split_over_replicas(loader)
        reads = ReadRecorder([*trainer.lightning_module.parameters()])
        with trainer.strategy.world.as_user(), reads:
            first = [_first_batch(loader, trainer.strategy.root_device, reads) for loader in combined.flattened]
        batches = [batch for batch, _ in first]
        if any(new is not old for (_, new), old in zip(first, combined.flattened, strict=True)):
            combined.flattened = [loader for _, loader in first]
            loaders = combined if isinstance(loaders, CombinedLoader) else combined.iterables
        needed = batches[:1] if combined._mode == "sequential" else batches
        if any(batch is _NOTHING for batch in needed):
            raise ValueError(
                "the loader yields no batch on this rank, and the step is recorded on a batch; provide data on every"
                " rank, or set Hybrid3DStrategy(example_batch=...)"
            )
        if combined._mode == "sequential":
            batch = batches[0]
        else:
            batch = torch.utils._pytree.tree_unflatten(batches, combined._spec)
        module = trainer.lightning_module
        batch = trainer.precision_plugin.convert_input(batch)
        if before is not None:
            before.append(ModuleSnapshot(module))
        batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
        return trainer.strategy.batch_to_device(batch, dataloader_idx=0)
    finally:
        states.restore()


def provide_loaders_once(loop: Any, loaders: Callable[[], Any]) -> None:
    """Let a loop's source of loaders return these the next time in this run, and call the user's hook from then on."""

    def dataloader_once() -> Any:
        undo()
        return loaders()

    undo = replace(loop._data_source, "dataloader", dataloader_once, reason="loaders of the recorded step are read on")
    loop.trainer.strategy.world.until_end.callback(undo)


def _first_batch(loader: Any, device: torch.device, reads: ReadRecorder) -> tuple[Any, Any]:
    """Return the first batch of a loader, and the loader that the loop is to read: mostly the same one."""
    if not isinstance(loader, DataLoader):
        taken, loader = _take_items(loader, 1, device, reads)
        return (taken[0] if taken else _NOTHING), loader
    inner = _loaders_inside(loader)
    samplers = [sampler for one in inner for sampler in samplers_of(one)]
    owners = [*inner, *samplers]
    drawing = [getattr(owner, "generator", None) for owner in owners]
    generators = {id(generator): generator for generator in drawing if isinstance(generator, torch.Generator)}
    drawn = [(generator, generator.get_state()) for generator in generators.values()]
    # Not the loader: one that has a state begins to read when it is asked for it.
    states = _states_of([*owners[1:], loader.dataset])
    kept = ArgumentSnapshot(samplers)
    try:
        if type(loader).__iter__ is not DataLoader.__iter__ and not _is_stateful(loader):
            with _without_workers(inner):
                return next(iter(loader), _NOTHING), loader  # only its own code knows what it hands out
        samples = _samples(loader, device, reads)
        return (_NOTHING if samples is _NOTHING else loader.collate_fn(samples)), loader
    finally:
        for generator, state in drawn:
            generator.set_state(state)
        kept.restore()
        _restore(states)


def _take_items(owner: Any, count: int, device: torch.device, reads: ReadRecorder) -> tuple[list[Any], Any]:
    """Return the first items, and the owner to read from then on.

    An owner that runs the model for its items (an environment played by a policy) has advanced with them, too.
    """
    states, before = _states_of([owner]), GeneratorStates(device)
    kept = ArgumentSnapshot([owner], longest=_LONGEST)
    rest = iter(owner)
    try:
        taken = list(itertools.islice(rest, count))
    finally:
        _restore(states)
    if not states and (reads.is_read or is_one_shot(owner)):
        owner = push_back(owner, PushedBackItems(taken, rest, before, GeneratorStates(device)))
    else:
        kept.restore()
    return taken, owner


def _loaders_inside(loader: DataLoader[Any]) -> list[DataLoader[Any]]:
    """Return the loader, and the loaders that one of a user's class reads from."""
    leaves = flatten(list(vars(loader).values()))[0]
    return [loader, *(leaf for leaf in leaves if isinstance(leaf, DataLoader) and leaf is not loader)]


@contextlib.contextmanager
def _without_workers(loaders: Sequence[DataLoader[Any]]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for loader in loaders:
            for name in ("num_workers", "timeout"):
                stack.enter_context(replaced(loader, name, 0, reason="an example batch is made here"))
        yield


def _states_of(owners: list[Any]) -> list[tuple[Any, Any]]:
    known = {id(owner): owner for owner in owners if _is_stateful(owner)}
    return [(owner, copy.deepcopy(owner.state_dict())) for owner in known.values()]


def _is_stateful(owner: Any) -> bool:
    return callable(getattr(owner, "state_dict", None)) and callable(getattr(owner, "load_state_dict", None))


def _restore(states: list[tuple[Any, Any]]) -> None:
    for owner, state in states:
        owner.load_state_dict(state)


def _samples(loader: DataLoader[Any], device: torch.device, reads: ReadRecorder) -> Any:
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset):
        if loader.num_workers:  # each worker reads a copy from its start
            return _as_samples(list(itertools.islice(iter(dataset), loader.batch_size or 1)), loader)
        torch.empty((), dtype=torch.int64).random_(
            generator=loader.generator
        )  # as an iterator of the loader does first
        count = loader.batch_size or 1
        return _as_samples(_take_items(dataset, count, device, reads)[0], loader)
    kept = ArgumentSnapshot([dataset], longest=_LONGEST)
    try:
        return _rows(loader)
    finally:
        kept.restore()


def _rows(loader: DataLoader[Any]) -> Any:
    dataset: Any = loader.dataset
    indices: Any = next(iter(loader.sampler if loader.batch_sampler is None else loader.batch_sampler), _NOTHING)
    if loader.batch_sampler is None or indices is _NOTHING:
        return _NOTHING if indices is _NOTHING else dataset[indices]
    if hasattr(dataset, "__getitems__"):
        return dataset.__getitems__(indices)
    return [dataset[index] for index in indices]


def _as_samples(taken: list[Any], loader: DataLoader[Any]) -> Any:
    if not taken:
        return _NOTHING
    return taken[0] if loader.batch_size is None else taken


_DEEPEST = 3


def is_one_shot(value: Any, depth: int = 0) -> bool:
    """Whether an iterable holds an iterator, or is one; ``depth`` counts the containers around it."""
    if isinstance(value, Iterator):
        return True
    if depth > _DEEPEST or isinstance(value, Tensor | nn.Module | type | str | bytes):
        return False
    parts = children_of(value)
    inner = parts[0][:10] if parts is not None else list(getattr(value, "__dict__", {}).values())
    return any(is_one_shot(part, depth + 1) for part in inner)


class PushedBackItems:
    """Items taken, and the rest of the stream; generators advanced by the taking advance when it is read."""

    def __init__(self, taken: list[Any], rest: Iterator[Any], before: GeneratorStates, after: GeneratorStates) -> None:
        self._items = chain(taken, rest)
        self._before, self._after = before, after

    def __iter__(self) -> Iterator[Any]:
        """Read it, once."""
        if self._before.are_unchanged():
            self._after.restore()
        yield from self._items


def push_back(owner: Any, back: PushedBackItems) -> Any:
    """Let the next reader that iterates over ``owner`` get ``back``, and later ones what they would have got.

    Returns the owner, or its replacement where it is a bare iterator.
    """
    kind = type(owner)

    def iterate(self: Any) -> Iterator[Any]:
        if type(self) is not given:  # it has been read since this iterator was made
            yield from kind.__iter__(self)
            return
        self.__class__ = kind
        yield from back

    try:
        members = {"__iter__": iterate, "__module__": kind.__module__, "__reduce_ex__": reduced_as(kind)}
        given = type(kind.__name__, (kind,), members)
        owner.__class__ = given
    except TypeError:  # a generator, or another object of Python's own
        return iter(back)
    return owner
