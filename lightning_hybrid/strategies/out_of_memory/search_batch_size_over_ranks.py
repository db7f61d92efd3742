"""Lightning's search of the largest batch size, ``BatchSizeFinder`` and ``Tuner.scale_batch_size``, over ranks.

Each trial is guarded: if one rank runs out of memory, all stop, and Lightning's search sees the same error on each. So
all ranks go on with the same size, whatever the mode of the search.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.tuner import batch_size_scaling

from lightning_hybrid.errors import RankOutOfMemory
from lightning_hybrid.patching import around, replace
from lightning_hybrid.strategies.world.ranks import RankWorld

if TYPE_CHECKING:
    from lightning_hybrid.strategies.out_of_memory.agree_before_collectives import MemoryGuard


def searches_batch_size(trainer: Any) -> bool:
    """Whether a callback of the trainer searches a batch size."""
    return any(isinstance(callback, BatchSizeFinder) for callback in trainer.callbacks)


def guard_trials(
    world: RankWorld, guard: MemoryGuard, before_trial: Callable[[], None], abandon: Callable[[], None]
) -> Callable[[], None]:
    """Let all ranks stop a trial together, and load one file after the last; return the undo.

    Args:
        world: The ranks of the run.
        guard: Of the run.
        before_trial: Called before each trial.
        abandon: Called after a trial that ran out of memory, on all ranks.
    """
    # Each rank would restore from a file of another name, of which one has been written.
    name = world.broadcast(str(uuid.uuid4()))
    undo, reason = contextlib.ExitStack(), "all ranks search one batch size"
    names = SimpleNamespace(uuid4=lambda: name)
    undo.callback(replace(batch_size_scaling, "uuid", names, reason=reason))

    def stop_together() -> None:
        abandon()
        world.catch_up(guard.largest)

    trial = partial(_run_trial, guard, before_trial, stop_together)
    undo.callback(around(batch_size_scaling, "_try_loop_run", trial, reason=reason))
    return undo.close


def _run_trial(
    guard: MemoryGuard,
    before_trial: Callable[[], None],
    abandon: Callable[[], None],
    original: Callable[..., None],
    *args: Any,
) -> None:
    before_trial()
    try:
        guard.run(lambda: original(*args))
    except RankOutOfMemory:
        abandon()
        raise
