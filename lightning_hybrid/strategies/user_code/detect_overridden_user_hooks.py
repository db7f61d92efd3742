"""Hooks that the user overrides: which of them exist, and so what they may read."""

from __future__ import annotations

import lightning.pytorch as pl

# Modules whose hooks no user wrote.
LIBRARY_PREFIXES = ("lightning.", "pytorch_lightning.", "lightning_hybrid.")


def output_is_read(trainer: pl.Trainer, name: str) -> bool:
    """Whether any hook of the user reads the output of a step."""
    return _is_overridden(trainer, f"on_{'train' if name == 'training_step' else name.removesuffix('_step')}_batch_end")


def old_gradients_are_read(trainer: pl.Trainer) -> bool:
    """Whether any hook of the user runs between a step and the clearing of the gradients before it."""
    return _is_overridden(trainer, "on_before_zero_grad") or _is_overridden(trainer, "optimizer_zero_grad")


def _is_overridden(trainer: pl.Trainer, hook: str) -> bool:
    users = [trainer.lightning_module, *trainer.callbacks]  # type: ignore[attr-defined]
    return any(not getattr(type(user), hook, pl.Callback).__module__.startswith(LIBRARY_PREFIXES) for user in users)
