"""The epoch of samplers, set before an iterator over them is made.

Lightning makes the first iterator of a run before it sets the epoch. Workers, and samplers that shuffle when they are
iterated over (a loader without batch size has one), would draw the order of epoch 0 in a run that goes on from a
checkpoint.
"""

from __future__ import annotations

from typing import Any

from lightning.fabric.utilities.data import _set_sampler_epoch


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
