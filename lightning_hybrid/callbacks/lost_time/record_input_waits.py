"""Waits for the batches of a run, recorded from the fetch to the start hook of the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer

from lightning_hybrid.patching import around


def record_input_waits(trainer: Trainer) -> Callable[[], None]:
    """Let the strategy's recorder know when the training loop begins to fetch a batch; returns what undoes it."""

    def before_fetch(original: Callable[[], None]) -> None:
        recorder: Any = trainer.strategy.recorder  # type: ignore[attr-defined]
        recorder.begin_input()
        original()

    loop: Any = trainer.fit_loop.epoch_loop
    return around(loop, "_on_before_fetch", before_fetch, reason="records waits for input")
