"""Optimizers for a step that reads them when it is recorded.

They are the run's own, whose changes are undone. A module that is built empty has none yet: their values are assigned
when it is in shards. Such a step is recorded with others, built by a separate call of `configure_optimizers`, whose
changes to the module are undone.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import lightning.pytorch as pl
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from lightning_hybrid.optimizers.replacement import replace_step
from lightning_hybrid.patching import replaced
from lightning_hybrid.randomness.generators import GeneratorStates
from lightning_hybrid.step.module_state.snapshots import ModuleSnapshot
from lightning_hybrid.strategies.start.example_batch import provide_loaders_once


class _OptimizersRead(BaseException):
    """A step read optimizers that are not built yet."""


class _NotBuilt(list[Any]):
    """Stands for a list of optimizers or schedulers; raises when it is read."""

    def _ask(self, *_: Any) -> NoReturn:
        raise _OptimizersRead

    __len__ = __bool__ = __iter__ = __getitem__ = __contains__ = __reversed__ = _ask


def record_with_optimizers(trainer: pl.Trainer, module: pl.LightningModule, record: Callable[[], None]) -> None:
    """Record a training step, with optimizers if it reads some."""
    strategy: Any = trainer.strategy
    if strategy._optimizers:
        with _not_stepping(strategy), _changes_undone(strategy.optimizers, strategy.lr_scheduler_configs):
            record()
        return
    before = strategy._optimizers, strategy._lightning_optimizers, strategy.lr_scheduler_configs
    try:
        unread = [_NotBuilt() for _ in before]
        strategy._optimizers, strategy._lightning_optimizers, strategy.lr_scheduler_configs = unread
        try:
            record()
            return
        except _OptimizersRead:
            pass
        strategy.optimizers, strategy.lr_scheduler_configs = [], []
        with _restored_afterwards(module, strategy.root_device), _loaders_reset_afterwards(trainer.fit_loop):
            strategy.optimizers, strategy.lr_scheduler_configs = _init_optimizers_and_lr_schedulers(module)
        with _not_stepping(strategy):
            record()
    finally:
        strategy._optimizers, strategy._lightning_optimizers, strategy.lr_scheduler_configs = before


@contextlib.contextmanager
def _not_stepping(strategy: Any) -> Iterator[None]:
    """Let steps of a strategy's optimizers run their closures alone: a recording has no gradients for them.

    Some change parameters all the same: by weight decay of their own, or by their hooks. Hooks such as
    `on_before_optimizer_step` would find no gradient to read.
    """
    reason = "a recording steps no parameters"

    def run_closure(_: Optimizer, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        return None if closure is None else closure()

    with contextlib.ExitStack() as undo:
        undo.enter_context(replaced(strategy, "optimizer_step", run_closure, reason=reason))
        for optimizer in strategy.optimizers:
            undo.callback(replace_step(optimizer, run_closure, None, reason=reason))
        yield


@contextlib.contextmanager
def _changes_undone(optimizers: Iterable[Any], configs: Iterable[Any]) -> Iterator[None]:
    """Restore the options and states of optimizers, and learning-rate schedulers, that a recorded step changes.

    Reading the state of a stand-in for a parameter is such a change.
    """
    tables = [table for optimizer in optimizers for table in (optimizer.state, *optimizer.param_groups)]
    changed: list[tuple[dict[Any, Any], dict[Any, Any]]] = [(table, dict(table)) for table in tables]
    schedulers = [(config.scheduler, copy.deepcopy(config.scheduler.state_dict())) for config in configs]
    try:
        yield
    finally:
        for scheduler, state in schedulers:
            scheduler.load_state_dict(state)
        for current, before in changed:
            current.clear()
            current.update(before)


@contextlib.contextmanager
def _loaders_reset_afterwards(loop: Any) -> Iterator[None]:
    """Undo the data set-up by `trainer.estimated_stepping_batches` inside: it draws, so it is repeated later."""
    was_set_up = loop._combined_loader is not None
    yield
    combined = loop._combined_loader
    if was_set_up or combined is None or not all(map(_is_rereadable, combined.flattened)):
        return
    loop._data_fetcher.teardown()
    loop._combined_loader = None
    provide_loaders_once(loop, lambda: combined)


def _is_rereadable(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)


@contextlib.contextmanager
def _restored_afterwards(module: pl.LightningModule, device: Any) -> Iterator[None]:
    """Undo the attributes, frozen parameters and draws of the `configure_optimizers` that runs inside."""
    state, generators = ModuleSnapshot(module), GeneratorStates(device)
    try:
        yield
    finally:
        state.restore()
        generators.restore()
